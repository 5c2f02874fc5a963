"""The random state of one rank."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

from shardplug.checkpoint.format.plain import UNREADABLE, load_plain, why
from shardplug.errors import CheckpointError

__all__ = ["read_rng", "rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's (if imported) and torch's generators."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
    if torch.accelerator.is_available():
        state["accelerator"] = _accelerator_module().get_rng_state()
    return state


def read_rng(folder: Path, rank: int) -> dict[str, Any]:
    """Read the random state that a rank saved, without running code in the file.

    Raises:
        CheckpointError: When it cannot be read, or is none.
    """
    file = folder / f"rng_{rank}.pt"
    try:
        state = load_plain(file)
        _check(state)
    except UNREADABLE as error:
        raise CheckpointError(f"{file} cannot be read: {why(error)}.") from error
    found: dict[str, Any] = state
    return found


def _check(state: Any) -> None:
    """Restore a state into generators that nobody uses.

    Raises:
        Exception: One of `UNREADABLE`, for what is no random state.
    """
    version, internal, gauss = state["python"]
    random.Random().setstate((version, tuple(internal), gauss))
    torch.Generator().set_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.RandomState().set_state(_numpy_state(state["numpy"]))


def _numpy_state(saved: Any) -> tuple[Any, ...]:
    import numpy

    kind, keys, position, has_gauss, cached = saved
    return kind, numpy.array(keys, numpy.uint32), position, has_gauss, cached


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(_numpy_state(state["numpy"]))
    if "accelerator" in state and torch.accelerator.is_available():
        _accelerator_module().set_rng_state(state["accelerator"])


def _accelerator_module() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.get_device_module(accelerator)
