"""Parameters that come into a model after it was sharded, or that nobody trains."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardplug.core._torch.groups import managed_parameters, sharded_of_gathered
from shardplug.errors import ModelError

__all__ = ["LateParameters", "UntrainedParameters"]


class LateParameters:
    """Finds parameters that a model has got since it was sharded.

    They are whole on each rank, and nothing reduces their gradients.

    Args:
        root: The sharded model.
        replicated: Its parameters that every rank holds whole.
    """

    def __init__(self, root: nn.Module, replicated: Sequence[nn.Parameter]) -> None:
        self._root = root
        self._known = {id(p): p for p in (*managed_parameters(root), *replicated)}
        self._listed: set[int] = set()

    def require_none(self) -> None:
        """Refuse trainable ones; list frozen ones once, on rank 0.

        Raises:
            ModelError: Naming them.
        """
        found = [
            (f"{prefix}.{name}" if prefix else name, parameter)
            for prefix, module in self._root.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in self._known
        ]
        gathered = sharded_of_gathered(self._root) if found else {}
        found = [(name, parameter) for name, parameter in found if id(parameter) not in gathered]
        trained = [name for name, parameter in found if parameter.requires_grad]
        if trained:
            raise ModelError(
                f"Expected the parameters that the model was sharded with, but {_some(trained)} "
                f"{_were(trained)} added or replaced afterwards: whole on each rank, without "
                "averaged gradients. Add and replace modules, and adapters, before the model is "
                "sharded (in Lightning in __init__ or configure_model)."
            )
        frozen = [name for name, p in found if id(p) not in self._listed]
        self._listed.update(id(parameter) for _, parameter in found)
        if frozen and dist.get_rank() == 0:
            warnings.warn(
                f"{_some(frozen)} {_were(frozen)} added after the model was sharded. Frozen, they "
                "are kept whole on each rank, with each rank's own values.",
                UserWarning,
                stacklevel=2,
            )


class UntrainedParameters:
    """Lists trainable parameters that no prepared optimizer has, once, on rank 0.

    An optimizer may be prepared after another one's first step. So the first step of an optimizer
    looks only at parameters that have a gradient, and its second one at all.
    """

    def __init__(self) -> None:
        self._listed: set[int] = set()
        self._looks: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )

    def look(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        stepping: torch.optim.Optimizer,
    ) -> None:
        """Compare models at rest with the optimizers.

        Args:
            models: The sharded models.
            optimizers: All that are prepared.
            stepping: The one that is about to step.
        """
        looks = self._looks[stepping] = self._looks.get(stepping, 0) + 1
        if looks > 2:
            return
        owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        names = []
        for model in models:
            for name, parameter in model.named_parameters():
                known = id(parameter) in owned or id(parameter) in self._listed
                if known or not parameter.requires_grad:
                    continue
                if parameter.grad is not None or looks > 1:
                    self._listed.add(id(parameter))
                    names.append(name)
        if names and dist.get_rank() == 0:
            warnings.warn(
                f"No optimizer trains {_some(names)}, though requires_grad is True. Give them to "
                "an optimizer, or freeze them: their gradients cost memory and time.",
                UserWarning,
                stacklevel=2,
            )


def _were(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more
