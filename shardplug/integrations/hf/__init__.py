"""Hugging Face models whose weights are read from safetensors files, each rank its own rows."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from shardplug.integrations.hf.loading import LoadReport, load_pretrained
from shardplug.integrations.hf.pretrained import from_pretrained

if _TYPE_CHECKING:
    from shardplug.integrations.hf.memory_curve import MemoryCurve
    from shardplug.integrations.hf.run_monitor import RunMonitor

__all__ = ["LoadReport", "MemoryCurve", "RunMonitor", "from_pretrained", "load_pretrained"]


def __getattr__(name: str) -> _Any:
    # Only the callbacks need Accelerate, which loading does not.
    if name == "MemoryCurve":
        from shardplug.integrations.hf.memory_curve import MemoryCurve

        return MemoryCurve
    if name == "RunMonitor":
        from shardplug.integrations.hf.run_monitor import RunMonitor

        return RunMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
