"""Hugging Face models whose weights are read from safetensors files, each rank its own rows."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from shardplug.hf.loading import LoadReport, load_pretrained
from shardplug.hf.pretrained import from_pretrained

if _TYPE_CHECKING:
    from shardplug.hf.memory_curve import MemoryCurve
    from shardplug.hf.run_monitor import RunMonitor

__all__ = ["LoadReport", "MemoryCurve", "RunMonitor", "from_pretrained", "load_pretrained"]


def __getattr__(name: str) -> _Any:
    # Only the callbacks need Accelerate, which loading does not.
    if name == "MemoryCurve":
        from shardplug.hf.memory_curve import MemoryCurve

        return MemoryCurve
    if name == "RunMonitor":
        from shardplug.hf.run_monitor import RunMonitor

        return RunMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
