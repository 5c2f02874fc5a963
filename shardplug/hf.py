"""Hugging Face models and callbacks; the code is in `shardplug.integrations.hf`."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from shardplug.integrations.hf import LoadReport, from_pretrained, load_pretrained

if _TYPE_CHECKING:
    from shardplug.integrations.hf import MemoryCurve, RunMonitor

__all__ = ["LoadReport", "MemoryCurve", "RunMonitor", "from_pretrained", "load_pretrained"]


def __getattr__(name: str) -> _Any:
    from shardplug.integrations import hf

    if name in __all__:
        return getattr(hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
