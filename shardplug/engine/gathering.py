"""Whole parameters for user code: to be read, changed, or differentiated through."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplug.collective import raise_together
from shardplug.core.gathered.modify import ModifiedPart, modify_whole
from shardplug.core.gathered.whole_parameters import hold_whole
from shardplug.engine.models import ShardedModel, ShardedModels
from shardplug.engine.offload import Offload
from shardplug.errors import ConfigError, ModelError, ScheduleError, ShardplugError

__all__ = ["Gathering"]

Part = tuple[ShardedModel, nn.Module]
"""A module, with what is kept for the model that it is in."""


class Gathering:
    """The contexts of `ZeroEngine.gathered`.

    Args:
        models: The sharded models.
        offload: The tiers.
        mesh: The ranks.
        control: All ranks, with messages on the CPU.
    """

    def __init__(
        self,
        models: ShardedModels,
        offload: Offload,
        mesh: DeviceMesh,
        control: dist.ProcessGroup,
    ) -> None:
        self._models = models
        self._offload = offload
        self._mesh = mesh
        self._control = control

    @contextmanager
    def open(
        self, model: nn.Module | None, *, modify: bool, src: int | None, grad: bool
    ) -> Iterator[None]:
        """Hold parameters whole: see `ZeroEngine.gathered`."""
        parts = self._models.parts(model)
        self._require_one_kind(modify, grad)
        if grad:
            context = self._differentiable(parts)
        elif modify or src is not None:
            context = self._modified(parts, modify, src)
        else:
            context = self._read_only(parts)
        with context:
            yield

    @contextmanager
    def _read_only(self, parts: list[Part]) -> Iterator[None]:
        held = [(sharded, sharded.calls.hold(part)) for sharded, part in parts]
        try:
            self._offload.raise_errors("Gathering")
            watched = [(sharded, sharded.calls.writes.watch(units)) for sharded, units in held]
            with torch.no_grad():
                yield
            self._refuse_writes(
                name for s, before in watched for name in s.calls.writes.drop_written(before)
            )
        finally:
            for sharded, units in held:
                sharded.calls.release(units)

    @contextmanager
    def _differentiable(self, parts: list[Part]) -> Iterator[None]:
        with hold_whole([(s.rank_sync.whole, part) for s, part in parts]):
            self._offload.raise_errors("Gathering")
            yield
            self._refuse_writes(n for s, _ in parts for n in s.rank_sync.whole.written())

    @contextmanager
    def _modified(self, parts: list[Part], modify: bool, src: int | None) -> Iterator[None]:
        error: ShardplugError | None = None
        world_size = dist.get_world_size()
        if not modify or isinstance(src, bool) or (src is not None and not 0 <= src < world_size):
            error = ConfigError(
                f"Expected src to be a rank below {world_size}, and modify=True with it, got "
                f"src={src} and modify={modify}."
            )
        elif any(s.calls.holds or s.calls.writes.is_modifying for s, _ in parts):
            error = ScheduleError(
                "Expected gathered(modify=True) outside of any other gathered() of the same "
                "model, found one within another."
            )
        named = [(index, _name_of(s, part)) for index, (s, part) in enumerate(parts)]
        said: list[Any] = [None] * world_size
        dist.all_gather_object(said, (src, named), group=self._control)
        if error is None and any(other != src for other, _ in said):
            error = ConfigError(f"Expected the same src on every rank, got {src} on this one.")
        elif error is None and any(other != named for _, other in said):
            names = [", ".join(name for _, name in other) for _, other in said]
            error = ScheduleError(
                "Expected the same module on every rank in gathered(modify=True), got "
                + ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(names))
                + ". Open the same one on all ranks, or a module that holds them all."
            )
        kind = ConfigError if error is None else type(error)
        self._agree("gathered(modify=True)", error, kind)
        changed = [
            ModifiedPart(sharded.model, part, sharded.replicated, sharded.calls.writes)
            for sharded, part in parts
        ]
        agree = functools.partial(self._agree, "Changing parameters in gathered(modify=True)")
        with modify_whole(changed, self._mesh, src, agree):
            yield

    def _require_one_kind(self, modify: bool, grad: bool) -> None:
        calls = [sharded.calls for sharded in self._models]
        if grad and modify:
            raise ConfigError("Expected gathered(grad=True) or gathered(modify=True), got both.")
        elif grad and any(call.holds for call in calls):
            found = "gathered(), in which gradients are off"
        elif grad and any(call.writes.is_modifying for call in calls):
            found = "gathered(modify=True)"
        elif not grad and any(sharded.rank_sync.whole.is_open for sharded in self._models):
            found = "gathered(grad=True)"
        else:
            return
        raise ScheduleError(f"Expected gathered(grad={grad}) by itself, found it inside {found}.")

    def _refuse_writes(self, written: Iterable[str]) -> None:
        names = list(written)
        error = (
            None
            if not names
            else ModelError(
                f"Expected parameters that are only read in gathered(), but {', '.join(names[:4])} "
                "changed; the changes are dropped. Use gathered(modify=True) to change weights."
            )
        )
        self._agree("Reading parameters in gathered()", error, ModelError)

    def _agree(self, doing: str, error: Exception | None, kind: type[ShardplugError]) -> None:
        raise_together(error, kind, doing, self._control)


def _name_of(sharded: ShardedModel, part: nn.Module) -> str:
    """Name a module of a sharded model."""
    names = (name for name, module in sharded.model.named_modules() if module is part)
    return next(names, "") or "the model"
