"""Whole master weights to be changed on purpose, and tensors that are put into shards."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardplug.core._torch.groups import (
    gathered_copy,
    label_of,
    own_rows,
    places_of,
    renew_shard,
    unit_groups,
)
from shardplug.core._torch.patches import assign_data
from shardplug.core._torch.resharding import forget_gather, pause_resets, run_before_loading
from shardplug.core._torch.tensors import laid_out_like, local_tensor
from shardplug.core.gathered.fingerprint import same_bits
from shardplug.core.gathered.writes import GatheredWrites
from shardplug.core.tier_tensor import in_tier
from shardplug.errors import ModelError, ScheduleError, ShardplugError, StorageError

__all__ = ["ModifiedPart", "modify_whole", "take_whole_tensors"]

Agree = Callable[[Exception | None, type[ShardplugError]], None]
"""Raises an error of one rank on every rank; told the class for the others. Collective."""


@dataclass(frozen=True, slots=True)
class ModifiedPart:
    """A module whose parameters are to be changed, in a sharded model."""

    model: nn.Module
    part: nn.Module
    replicated: Sequence[nn.Parameter]
    """Parameters of the model that every rank holds whole."""
    writes: GatheredWrites


@contextmanager
def modify_whole(
    parts: Sequence[ModifiedPart], mesh: DeviceMesh, src: int | None, agree: Agree
) -> Iterator[None]:
    """Show whole master weights in the modules, and put them into the shards at the exit.

    Collective to enter and to leave. An exception in the context, on any rank, leaves the
    parameters as they were on every rank.

    Args:
        parts: What to change.
        mesh: The ranks: shards, or replicas and shards.
        src: The rank whose values count on all; None means that each rank keeps its own rows.
        agree: See `Agree`.

    Raises:
        ModelError: On every rank, when a parameter has got another shape or dtype.
        ScheduleError: On every rank, when another rank raised in the context.
    """
    changes = [_Change(part, mesh, src) for part in parts]
    error: BaseException | None = None
    try:
        for change in changes:
            change.show()
        try:
            with torch.no_grad():
                yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            _tell(error, agree)
        agree(_first_problem(changes), ModelError)
        failures = [failure for change in changes for failure in change.write()]
        agree(failures[0] if failures else None, StorageError)
    finally:
        for change in changes:
            change.put_back()


def _tell(error: BaseException | None, agree: Agree) -> None:
    """Tell the other ranks of an exception, or hear of theirs."""
    told = None if error is None else RuntimeError(f"{type(error).__name__}: {error}")
    try:
        agree(told, ScheduleError)
    except (ScheduleError, RuntimeError):
        if error is None:
            raise


def _first_problem(changes: Sequence[_Change]) -> Exception | None:
    problems = [problem for change in changes for problem in change.problems()]
    if not problems:
        return None
    return ModelError(
        "Expected parameters to keep shape, dtype and requires_grad in gathered(modify=True), but "
        f"{'; '.join(problems[:4])}. Nothing was changed. Resize or convert before sharding."
    )


class _Change:
    """One module's parameters while they are whole."""

    def __init__(self, part: ModifiedPart, mesh: DeviceMesh, src: int | None) -> None:
        self._part = part
        self._mesh = mesh
        self._src = src
        inside = set(part.part.modules())
        groups = [group for _, group in unit_groups(part.model)]
        self._groups = [
            group
            for group in groups
            if any(m in inside for param in group.fsdp_params for m, _ in places_of(param))
        ]
        self._params = [
            param
            for group in self._groups
            for param in group.fsdp_params
            if any(module in inside for module, _ in places_of(param))
        ]
        own = {id(p) for p in part.part.parameters()}
        self._replicated = [p for p in part.replicated if id(p) in own]
        self._names = {id(p): name for name, p in part.model.named_parameters()}
        self._gathered: list[Any] = []
        self._before: list[torch.Tensor] = []
        self._shown: dict[Any, nn.Parameter] = {}
        self._undo: list[Callable[[], None]] = []

    def show(self) -> None:
        """Put whole master weights into the modules. Collective."""
        self._gathered = [group for group in self._groups if group.is_unsharded]
        for group in self._groups:
            forget_gather(group)
        self._before = [p.detach().clone() for p in self._replicated]
        for param in self._params:
            whole = _gather_master(param, self._mesh)
            shown = nn.Parameter(whole, requires_grad=param.sharded_param.requires_grad)
            self._shown[param] = shown
            self._undo.append(pause_resets(param))
            for module, name in places_of(param):
                module._parameters[name] = shown
        self._part.writes.set_modified(self._params)

    def _now(self, param: Any) -> list[torch.Tensor | None]:
        return [module._parameters.get(name) for module, name in places_of(param)]

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the parameters, by name."""
        if self._src is not None and dist.get_rank() != self._src:
            return  # what this rank has does not count
        for param in self._params:
            expected, now = param.sharded_param, self._now(param)
            one = now[0]
            if one is None or any(other is not one for other in now):
                yield f"{label_of(param)} was taken out, or stands for different tensors now"
            elif one.requires_grad != expected.requires_grad:
                yield (
                    f"{label_of(param)} was frozen or unfrozen (requires_grad), which counts "
                    "outside of the context alone"
                )
            elif one.shape != expected.shape or one.dtype != expected.dtype:
                yield (
                    f"{label_of(param)} is {tuple(one.shape)} in {one.dtype}, no longer "
                    f"{tuple(expected.shape)} in {expected.dtype}"
                )
        for parameter, before in zip(self._replicated, self._before, strict=True):
            if parameter.shape != before.shape or parameter.dtype != before.dtype:
                name = self._names.get(id(parameter), "a parameter")
                yield f"{name} is {tuple(parameter.shape)}, no longer {tuple(before.shape)}"

    @torch.no_grad()
    def write(self) -> list[StorageError]:
        """Put the values into the shards; return what failed. Collective."""
        failures: list[StorageError] = []
        for parameter in self._replicated:  # one value for all: there are no rows to keep
            dist.broadcast(parameter.data, src=self._src or 0)
        self._before = []
        for param in self._params:
            values = self._values(param)
            rows = own_rows(param, values)
            if self._src is None and self._mesh.ndim > 1:  # replicas hold the same
                rows = rows.contiguous()
                dist.broadcast(rows, group=self._mesh.get_group(0), group_src=0)
            try:
                changed = put_rows(param, rows)
            except StorageError as error:  # the other ranks wait in the next broadcast
                failures.append(error)
                continue
            copy = gathered_copy(param)
            if changed and copy is not None and not copy.is_inference():
                # A backward that needs the old values raises, as it does in one process.
                torch.autograd.graph.increment_version(copy)
        return failures

    def _values(self, param: Any) -> torch.Tensor:
        shown = self._shown[param]
        if self._src is None or dist.get_rank() == self._src:
            found = self._now(param)[0]
            assert found is not None
            values = found.detach().to(shown.device).contiguous()
        else:
            values = torch.empty(
                param.sharded_param.shape, dtype=param.sharded_param.dtype, device=shown.device
            )
        if self._src is not None:
            dist.broadcast(values, src=self._src)
        return values

    def put_back(self) -> None:
        """Put the shards into the modules again, and gather what was gathered before."""
        for parameter, before in zip(self._replicated, self._before, strict=False):
            parameter.data = before
        for param in self._shown:
            for module, name in places_of(param):
                module._parameters[name] = param.sharded_param
        self._shown.clear()
        while self._undo:
            self._undo.pop()()
        self._part.writes.set_modified(())
        for group in self._gathered:
            group.unshard()
            group.wait_for_unshard()
        self._gathered = []


def _gather_master(param: Any, mesh: DeviceMesh) -> torch.Tensor:
    """Return the whole master weights of one of FSDP2's parameters, on its device. Collective."""
    local = local_tensor(param.sharded_param)
    resting = in_tier(local)
    rows = (local if resting is None else resting.holder.read()).detach().to(param.device)
    padded = rows.new_zeros(param.padded_sharded_param_size)
    padded[: rows.shape[0]].copy_(rows)
    group = mesh.get_group(mesh.ndim - 1)
    size = dist.get_world_size(group)
    whole = padded.new_empty((size * padded.shape[0], *padded.shape[1:]))
    if whole.numel():
        as_bytes = [t.view(-1).view(torch.uint8) for t in (whole, padded)]  # for every dtype
        dist.all_gather_into_tensor(as_bytes[0], as_bytes[1], group=group)
    return whole[: param.sharded_param.shape[0]]


def put_rows(param: Any, rows: torch.Tensor) -> bool:
    """Replace this rank's part of a parameter; return whether its values have changed.

    Args:
        param: FSDP2's parameter.
        rows: This rank's rows, of any dtype and device.
    """
    local = local_tensor(param.sharded_param)
    resting = in_tier(local)
    old = local.detach() if resting is None else resting.holder.read()
    rows = rows.detach().to(old).contiguous()
    if old.is_cpu and same_bits(rows, old.contiguous()):
        return False
    local.copy_(rows)
    return True


# ---------------------------------------------------------------- tensors from elsewhere


def take_whole_tensors(
    model: nn.Module,
    replicated: Sequence[nn.Parameter],
    writes: GatheredWrites,
    is_held: Callable[[], bool],
) -> None:
    """Let `load_state_dict` and `parameter.data = tensor` take whole tensors.

    Each rank keeps its rows of what it is given, in the dtype and the place that the shard has.

    Args:
        model: The sharded model.
        replicated: Its parameters that every rank holds whole.
        writes: Of the model.
        is_held: Whether parameters are held whole to be read, where nothing can be loaded.
    """
    by_module: dict[nn.Module, dict[str, tuple[Any, Any]]] = {}
    for _, group in unit_groups(model):
        for param in group.fsdp_params:
            assign_data(param, functools.partial(_assign, weakref.ref(param)))
            for module, name in places_of(param):
                by_module.setdefault(module, {})[name] = (param, group)
    whole = {id(parameter) for parameter in replicated}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in whole:
                by_module.setdefault(module, {})[name] = (parameter, None)
    for module, params in by_module.items():
        run_before_loading(module, functools.partial(_before_loading, params, writes, is_held))


@torch.no_grad()
def _assign(known: weakref.ref[Any], value: torch.Tensor) -> None:
    param = known()  # weak: what is kept by parameter must not keep the parameter
    if param is None:
        raise ModelError("Expected a parameter of a sharded model that is still there.")
    expected = param.sharded_param
    if value.shape != expected.shape or value.dtype != expected.dtype:
        raise ModelError(
            f"Expected data of shape {tuple(expected.shape)} and {expected.dtype} for "
            f"{label_of(param)}, which is sharded, got {tuple(value.shape)} and {value.dtype}. "
            "Resize or convert parameters before they are sharded."
        )
    rows = _rows_for(param, value)
    local = local_tensor(expected)
    # As with any parameter, a tensor that was taken by `parameter.data` before keeps its values.
    if in_tier(local) is not None or not renew_shard(param, rows.detach().to(local, copy=True)):
        put_rows(param, rows)


def _rows_for(param: Any, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a whole tensor, or of one that is sharded."""
    if not isinstance(value, DTensor):
        return own_rows(param, value)
    expected = param.sharded_param
    if value.device_mesh == expected.device_mesh and value.placements == expected.placements:
        return local_tensor(value)
    return own_rows(param, value.full_tensor())


@torch.no_grad()
def _before_loading(
    params: dict[str, tuple[Any, Any]],
    writes: GatheredWrites,
    is_held: Callable[[], bool],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *_: Any,
) -> None:
    if is_held():
        raise ScheduleError(
            "Expected no load_state_dict() while parameters are held whole to be read "
            "(gathered()), as it would end the gathering. Load outside of the context."
        )
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    for name, (param, group) in params.items():
        value = state_dict.get(prefix + name)
        if group is None:
            if assign and isinstance(value, torch.Tensor) and value.shape == param.shape:
                state_dict[prefix + name] = param.copy_(value)  # it stays, as the others do
            continue
        if value is None or writes.is_modified(param):
            continue  # whole at the moment: torch loads it
        forget_gather(group)
        expected = param.sharded_param
        if not isinstance(value, torch.Tensor) or value.is_meta or value.shape != expected.shape:
            continue  # torch says what is wrong
        if assign:  # the parameter that the optimizer has stays
            put_rows(param, _rows_for(param, value))
            state_dict[prefix + name] = expected
        elif not isinstance(value, DTensor):
            state_dict[prefix + name] = laid_out_like(own_rows(param, value.detach()), expected)
