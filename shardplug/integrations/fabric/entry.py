"""What Fabric wraps in place of the sharded module."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Entry", "bare"]


class Entry(nn.Module):
    """Stands between Fabric's wrapper and the sharded module.

    Because it is another object than the module, Fabric sends step methods and those marked with
    `mark_forward_method` through the module's forward, where the parameters are gathered, and
    names methods that were not marked.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)


def bare(module: nn.Module) -> nn.Module:
    """Return the module inside an Entry, or the module itself."""
    return module.module if isinstance(module, Entry) else module
