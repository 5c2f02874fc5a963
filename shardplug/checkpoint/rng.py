"""The random state of one rank."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["rng_state", "set_rng_state"]


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


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, numpy.uint32), position, has_gauss, cached))
    if "accelerator" in state and torch.accelerator.is_available():
        _accelerator_module().set_rng_state(state["accelerator"])


def _accelerator_module() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.get_device_module(accelerator)
