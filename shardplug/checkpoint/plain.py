"""Values that can be read back without running code from the file."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import IO, Any

import torch

__all__ = ["UNREADABLE", "culprit", "load_plain", "with_tensors"]

UNREADABLE = (pickle.PickleError, OSError, RuntimeError, EOFError)
"""What `load_plain` raises for a file that is damaged or holds other objects."""


def load_plain(file: str | PathLike[str] | IO[bytes]) -> Any:
    """Load plain types and tensors onto the CPU; anything else in the file raises."""
    # torch writes empty bytes as a call of `bytes`, and does not read it back by itself.
    with torch.serialization.safe_globals([bytes]):
        return torch.load(file, map_location="cpu", weights_only=True)


def culprit(where: str, value: Any) -> tuple[str, Any] | None:
    """Find the innermost part of a value that would not be read back.

    Args:
        where: What the message calls the value.
        value: Anything.

    Returns:
        The part and where it is, or None when all reads back.
    """
    if _reads_back(value):
        return None
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, (list, tuple)):
        items = iter(enumerate(value))
    for key, item in items:
        found = culprit(f"{where}[{key!r}]", item)
        if found is not None:
            return found
    return where, value


def _reads_back(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(with_tensors(value, lambda _: None), buffer)  # those read back, and may be large
        buffer.seek(0)
        load_plain(buffer)
    except (*UNREADABLE, TypeError, AttributeError, ValueError):
        return False
    return True


def with_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a value with each tensor in its containers replaced by what `change` makes of it."""
    if type(value) is torch.Tensor:
        return change(value)
    if type(value) is dict:
        return {key: with_tensors(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_tensors(item, change) for item in value)
    return value
