"""Whole parameters that gradients flow to, in the place of shards."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardplug.core._torch.calls import PausableUnits
from shardplug.core._torch.gradients import (
    BackwardWatch,
    add_whole_gradient,
    before_root_backward_ends,
    end_of_backward,
)
from shardplug.core._torch.groups import compute_dtype, label_of, owns_any, unit_groups
from shardplug.core._torch.resharding import before_state_dict, in_own_backward
from shardplug.core._torch.stand_ins import stand_in, step_back, whole_values
from shardplug.core.gathered.fingerprint import Fingerprint, changed_since, fingerprint
from shardplug.core.root import refuse_state_dict

__all__ = ["WholeParameters", "hold_whole", "is_whole", "traced"]

traced: ContextVar[bool] = ContextVar("traced", default=False)
"""Whether a step is traced on plain parameters, so that there is nothing to gather."""

_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_whole(unit: nn.Module) -> bool:
    """Whether a unit computes with whole parameters that gradients flow to."""
    return unit in _whole


@contextmanager
def hold_whole(parts: Iterable[tuple[WholeParameters, nn.Module]]) -> Iterator[None]:
    """Keep parts of models whole, with gradients. Collective to enter."""
    with ExitStack() as stack:
        for whole, part in parts:
            stack.callback(whole.close, whole.open(part))
        yield


class WholeParameters:
    """Whole copies of one model's parameters, made when a context opens.

    While it is open, the copies stand on the modules in the place of the shards, in the dtype that
    the shards have, and FSDP2 does not gather for calls of their units. They are leaves: what a
    backward brings to a copy, inside or after the context, is added to what FSDP2 keeps of this
    rank's gradient, and is reduced with it. So that ranks which use different copies exchange the
    same messages, every rank reduces the units concerned at the end of each backward of the window.

    Args:
        root: The sharded model.
        watch: Sees the reductions.
    """

    def __init__(self, root: nn.Module, watch: BackwardWatch) -> None:
        self._root = root
        self._watch = watch
        self._open: Counter[Any] = Counter()
        self._copies: dict[Any, list[tuple[Any, nn.Parameter]]] = {}
        self._opened: dict[Any, Fingerprint] = {}
        self._no_state_dict: dict[Any, RemovableHandle] = {}
        self._arrived: dict[int, tuple[Any, Any, torch.Tensor]] = {}
        self._in_call: nn.Module | None = None
        PausableUnits(root, self._is_paused, self._call_begins, self._call_ends)
        before_root_backward_ends(root, self._backward_ends)

    @property
    def is_open(self) -> bool:
        """Whether a context is open."""
        return bool(self._open)

    def open(self, part: nn.Module) -> list[Any]:
        """Put whole copies of what `part` computes with on the modules. Collective.

        Args:
            part: The model, or a module in it.

        Returns:
            The parameter groups, for `close`. A group that `part` shares with other modules is
            whole for all of them.
        """
        modules = set(part.modules())
        groups = [g for _, g in unit_groups(self._root) if owns_any(g, modules)]
        for group in groups:
            if group not in self._open:
                self._copies[group] = [
                    (param, self._copy(group, param, values))
                    for param, values in whole_values(group)
                ]
                self._opened.update(
                    (param, fingerprint(copy)) for param, copy in self._copies[group]
                )
                unit = group.modules[0]
                _whole.add(unit)
                self._no_state_dict[group] = before_state_dict(unit, refuse_state_dict)
            self._open[group] += 1
            self._watch.late[id(group)] = group
            self._watch.kept_late.add(id(group))
        self._stand_in()
        return groups

    def close(self, groups: Iterable[Any]) -> None:
        """End an `open`."""
        self._in_call = None
        for group in groups:
            self._open[group] -= 1
            if self._open[group]:
                continue
            del self._open[group]
            self._watch.kept_late.discard(id(group))
            _whole.discard(group.modules[0])
            self._no_state_dict.pop(group).remove()
            for param, _ in self._copies.pop(group):
                del self._opened[param]
                step_back(param)

    def written(self) -> list[str]:
        """Return the names of the copies that were changed: their values go nowhere."""
        return [
            label_of(param)
            for param, copy in self._all_copies()
            if changed_since(copy.detach(), self._opened[param])
        ]

    def reset(self) -> None:
        """Forget gradients that have not been reduced, and a call that an exception ended."""
        self._arrived.clear()
        self._in_call = None
        self._stand_in()

    def _copy(self, group: Any, param: Any, values: torch.Tensor) -> nn.Parameter:
        copy = nn.Parameter(values, requires_grad=param.sharded_param.requires_grad)
        if copy.requires_grad:
            action = functools.partial(self._gradient_arrives, group, param)
            copy.register_post_accumulate_grad_hook(action)  # type: ignore[no-untyped-call]
        return copy

    def _all_copies(self) -> Iterable[tuple[Any, nn.Parameter]]:
        return (pair for copies in self._copies.values() for pair in copies)

    def _stand_in(self) -> None:
        for param, copy in self._all_copies():
            stand_in(param, copy)

    # ---------------------------------------------------------------- calls of units

    def _is_paused(self, unit: nn.Module) -> bool:
        return unit in _whole and not in_own_backward(unit)

    def _call_begins(self, unit: nn.Module) -> None:
        """Show the dtype of the computation, as in any forward."""
        if self._in_call is not None:
            return
        self._in_call = unit
        for param, copy in self._all_copies():
            dtype = compute_dtype(param)
            if dtype is not None:
                stand_in(param, copy.to(dtype))

    def _call_ends(self, unit: nn.Module) -> None:
        if self._in_call is unit:
            self._in_call = None
            self._stand_in()

    # ---------------------------------------------------------------- gradients

    def _gradient_arrives(self, group: Any, param: Any, copy: torch.Tensor) -> None:
        grad, copy.grad = copy.grad, None
        assert grad is not None
        known = self._arrived.get(id(param))
        total = grad.detach() if known is None else known[2] + grad.detach()
        self._arrived[id(param)] = (group, param, total)
        self._watch.late[id(group)] = group
        end_of_backward(self._root)

    def _backward_ends(self) -> None:
        for _, param, grad in self._arrived.values():
            add_whole_gradient(param, grad)
        self._arrived.clear()
        self._watch.reduce_late()
        self._stand_in()
