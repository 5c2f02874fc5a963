"""Binds optimizers to the sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardplug.core._torch.groups import sharded_of_gathered
from shardplug.core._torch.tensors import WeakTensorKeyDictionary
from shardplug.errors import OptimizerError

__all__ = ["Binding"]


class Binding:
    """Knows which sharded parameter stands where another one stood.

    Args:
        resting: Returns the parameters of all sharded models at rest: shards, and those that
            every rank holds whole.
        models: Returns the sharded models.
    """

    def __init__(
        self,
        resting: Callable[[], Iterable[nn.Parameter]],
        models: Callable[[], Sequence[nn.Module]],
    ) -> None:
        self._resting = resting
        self._models = models
        # Weak: the unsharded parameters are to go when the caller lets go of them.
        self._successors: Any = WeakTensorKeyDictionary()

    def record(self, before: Iterable[tuple[str, nn.Parameter]], model: nn.Module) -> None:
        """Note what became of the parameters that `model` had before it was sharded."""
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before:
            if after[name] is not parameter:
                self._successors[parameter] = after[name]

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sharded parameter for one from before sharding, or for a gathered copy."""
        new = self._successors.get(parameter)
        if new is None:
            # After a forward without a backward, stages 1 and 2 still show gathered copies.
            copies = (sharded_of_gathered(model) for model in self._models())
            new = next((known[id(parameter)] for known in copies if id(parameter) in known), None)
        return parameter if new is None else new

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace an optimizer's parameters and state by sharded ones, now and in later groups.

        Raises:
            OptimizerError: When it holds a parameter of no sharded model, or none at all.
        """
        for group in optimizer.param_groups:
            group["params"] = [self._succeed(optimizer, p) for p in group["params"]]
        self.require_known(optimizer, optimizer.param_groups)
        if not any(group["params"] for group in optimizer.param_groups):
            raise OptimizerError(
                "Expected an optimizer with parameters, got one whose groups are all empty."
            )
        original = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            original(self._bound_group(optimizer, param_group))

        optimizer.add_param_group = add_param_group  # type: ignore[method-assign]

    def require_known(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], first: int = 0
    ) -> None:
        """Refuse parameters that are no sharded model's.

        Args:
            optimizer: Named in the message.
            groups: Groups to look at.
            first: Number of the first of them.

        Raises:
            OptimizerError: Naming the group and the position.
        """
        known = {id(parameter) for parameter in self._resting()}
        for index, group in enumerate(groups, start=first):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise OptimizerError(
                        f"Expected {type(optimizer).__name__} to hold parameters of the sharded "
                        f"model, but parameter {position} of group {index} "
                        f"(shape {tuple(parameter.shape)}) is not one of them: it would train "
                        "nothing. Build the optimizer from model.parameters() of this very "
                        "model, before or after sharding."
                    )

    def _bound_group(
        self, optimizer: torch.optim.Optimizer, param_group: dict[str, Any]
    ) -> dict[str, Any]:
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        named = [p if isinstance(p, tuple) else (None, p) for p in given]
        params = [self._succeed(optimizer, p) for _, p in named]
        self.require_known(optimizer, [{"params": params}], len(optimizer.param_groups))
        names = [name for name, _ in named]
        param_group["params"] = params if None in names else list(zip(names, params, strict=True))
        return param_group

    def _succeed(self, optimizer: torch.optim.Optimizer, old: torch.Tensor) -> torch.Tensor:
        new = self.current(old)
        if new is not old and old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {
                key: _shard_like(value, new, old.shape) for key, value in state.items()
            }
        return new


def _shard_like(value: Any, parameter: torch.Tensor, old_shape: torch.Size) -> Any:
    """Shard a whole state tensor like its parameter; rank 0's values count."""
    if (
        isinstance(value, torch.Tensor)
        and isinstance(parameter, DTensor)
        and value.shape == old_shape
        and value.ndim > 0
    ):
        return distribute_tensor(
            value.to(parameter.device_mesh.device_type), parameter.device_mesh, parameter.placements
        )
    return value
