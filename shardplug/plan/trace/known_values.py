"""Values of small integer tensors in a trace, for code that looks at positions and masks.

Models ask, for example, whether position ids begin anew within a row. Such values depend neither
on weights nor on data, so they are computed beside the trace.
"""

from __future__ import annotations

from typing import Any

import torch

from shardplug.core._torch.tensors import tree_leaves, tree_map

__all__ = ["KnownValues", "meta_like"]

_LARGEST = 2**20  # elements
_VALUE = "_shardplug_known_value"


def meta_like(value: Any) -> Any:
    """Return a tensor of the same shape and dtype on meta; other things as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


class KnownValues:
    """Follows operations on tensors whose values are known, on the CPU."""

    def meta_like(self, value: Any) -> Any:
        """As `meta_like`, remembering the values of integer tensors that have any."""
        made = meta_like(value)
        if isinstance(value, torch.Tensor) and not value.is_meta and _is_small(value):
            setattr(made, _VALUE, value.detach().cpu())
        return made

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the number in a tensor of one element.

        Raises:
            RuntimeError: When it is not known.
        """
        known = getattr(tensor, _VALUE, None)
        if known is None:
            raise RuntimeError(
                "The model looks at a value that depends on its weights or on the data, which a "
                "trace without memory does not have."
            )
        return known.item()

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Compute an operation's values too, where those of all its inputs are known."""
        outputs = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
        if not outputs or not all(_is_small(value) for value in outputs):
            return
        inputs = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        if not all(hasattr(value, _VALUE) for value in inputs):
            return
        if torch.Tag.nondeterministic_seeded in func.tags:
            return  # it would take numbers from the user's random state
        args, kwargs = tree_map(_known, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            values = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, ValueError):
            return  # not known, then
        for made, value in zip(outputs, tree_leaves(values), strict=True):
            setattr(made, _VALUE, value)


def _known(value: Any) -> Any:
    return getattr(value, _VALUE) if isinstance(value, torch.Tensor) else value


def _is_small(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.numel() <= _LARGEST
