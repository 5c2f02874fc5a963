"""Tries an optimizer that the library does not know on small copies of its parameters."""

from __future__ import annotations

import copy
import datetime
import gc
import itertools
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardplug.collective import raise_together
from shardplug.core._torch.calls import uncompiled
from shardplug.core._torch.collectives import close_mesh
from shardplug.core._torch.patches import patch_for, unpatch_for
from shardplug.core._torch.tensors import TorchDispatchMode
from shardplug.core.gathered.outside_use import refuse_mixed_scalar
from shardplug.errors import OptimizerError
from shardplug.optim.classes import INSTANCE_ATTRIBUTES, is_elementwise
from shardplug.optim.step import step_is_replaced

__all__ = ["try_on_copies"]

_STEPS = 3
_WHOLE_ELEMENTS = 65536
"""Parameters up to this size are copied in their own shape; dimensions of larger ones are cut."""

_LARGEST_DIMENSION = {1: 65536, 2: 256}
_TIMEOUT = datetime.timedelta(seconds=30)
"""How long a rank waits for one that failed alone, where closed connections do not tell it."""

_TOLERANCE = 1e-4
"""Of the largest change of a parameter: sums over ranks round in another way."""

_TOLERANCE_16_BIT = 0.05
"""The same for optimizers that compute in 16 bits, as Newton-Schulz iterations do."""

_NUMBERS = itertools.count()
_VARIED = frozenset({"params", "param_names", "name", "lr", "initial_lr", "weight_decay"})
"""Options in which groups may differ without being tried each for itself."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Parameters that are tried as one."""

    parameter: torch.Tensor
    """The first of them."""

    group: int
    shape: tuple[int, ...]
    """Shape of the copy."""

    name: str

    @property
    def placements(self) -> tuple[Any, ...] | None:
        """How the parameter is spread over the ranks that share it; None for a whole one."""
        return self.parameter.placements[-1:] if isinstance(self.parameter, DTensor) else None


class _UntriedError(Exception):
    """The optimizer cannot take a step on whole copies in one process either."""


class _LostPeerError(Exception):
    """Another rank's part of the trial ended."""


def try_on_copies(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    mesh: DeviceMesh,
    control: dist.ProcessGroup,
) -> None:
    """Refuse an optimizer that is not the same on sharded parameters as on whole ones. Collective.

    A class that is not known to treat each element alone takes a few steps twice on CPU copies of
    one parameter of each kind: on ordinary tensors, and on DTensors spread over the ranks like the
    parameters. Parameters and state must come out equal. The optimizer itself is not changed.

    An optimizer that cannot step the ordinary copies (it needs a GPU, or a call before the first
    step) is let through with a warning.

    Args:
        optimizer: The user's optimizer, over sharded parameters.
        names: Names of the parameters by id.
        mesh: The engine's mesh; its last axis is the one that parameters are spread over.
        control: All ranks, with messages on the CPU.

    Raises:
        OptimizerError: On every rank, naming the optimizer, the parameter and what went wrong.
    """
    if is_elementwise(type(optimizer)) or _is_known(optimizer) or step_is_replaced(optimizer):
        return
    kinds = _kinds(optimizer, names, mesh.size(mesh.ndim - 1))
    try:
        _attempt(optimizer, kinds, mesh, control, "its parameters")
    except OptimizerError:
        for kind in kinds if len(kinds) > 1 else ():  # which of them is it?
            _attempt(optimizer, [kind], mesh, control, "")
        raise


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    owner = next(c for c in kind.__mro__ if "step" in vars(c))
    return owner is torch.optim.Muon or owner.__module__.startswith("torchao.")


def _kinds(optimizer: torch.optim.Optimizer, names: Mapping[int, str], ranks: int) -> list[_Kind]:
    found: dict[Any, _Kind] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = repr({key: value for key, value in group.items() if key not in _VARIED})
        for parameter in group["params"]:
            if not parameter.requires_grad or not parameter.numel():
                continue
            name = names.get(id(parameter), "a parameter")
            kind = _Kind(parameter, number, _small(parameter, ranks), name)
            found.setdefault((options, kind.shape, parameter.dtype, kind.placements), kind)
    return list(found.values())


def _small(parameter: torch.Tensor, ranks: int) -> tuple[int, ...]:
    """Cut a shape, so that rows remain for each rank as they do in the whole."""
    shape = list(parameter.shape)
    if parameter.numel() <= _WHOLE_ELEMENTS:
        return tuple(shape)
    limit = _LARGEST_DIMENSION.get(len(shape), 16)
    placement = parameter.placements[-1] if isinstance(parameter, DTensor) else None
    for index, size in enumerate(shape):
        if isinstance(placement, Shard) and placement.dim == index:
            most = max(limit // ranks, 1) * ranks
            shape[index] = most + size % ranks if size > most + ranks else size
        else:
            shape[index] = min(size, limit)
    return tuple(shape)


def _attempt(
    optimizer: torch.optim.Optimizer,
    kinds: Sequence[_Kind],
    mesh: DeviceMesh,
    control: dist.ProcessGroup,
    what: str,
) -> None:
    """Try some kinds; raise on every rank what went wrong on one."""
    problem = _problem(optimizer, kinds, _mesh_of_own(mesh))
    if problem is not None:
        gc.collect()  # the group's connections close, and ranks that wait for this one get an error
    where = what or f"{kinds[0].name}, of shape {tuple(kinds[0].parameter.shape)}"
    text = None if problem is None else _refusal(optimizer, where, problem)
    error = None if text is None else OptimizerError(text)
    raise_together(error, OptimizerError, "A trial step", control)


def _mesh_of_own(mesh: DeviceMesh) -> DeviceMesh:
    """Make a mesh of the ranks that parameters are spread over, with CPU groups of its own."""
    own = None
    for ranks in mesh.mesh.view(-1, mesh.size(mesh.ndim - 1)).tolist():
        group = dist.new_group(ranks, backend="gloo", timeout=_TIMEOUT)
        own = group if dist.get_rank() in ranks else own
    dist.barrier(group=own)  # no rank may close it before all have connected
    # A name of its own: DTensor's caches take meshes of equal ranks and names for one another.
    assert isinstance(own, dist.ProcessGroup)
    return DeviceMesh.from_group(own, "cpu", mesh_dim_names=(f"trial_{next(_NUMBERS)}",))


def _problem(
    optimizer: torch.optim.Optimizer, kinds: Sequence[_Kind], mesh: DeviceMesh
) -> str | None:
    """Return what is wrong on this rank, if anything; the mesh's group is gone afterwards."""
    patch_for(mesh, refuse_mixed_scalar)  # as for the engine's own mesh
    try:
        with torch.random.fork_rng(devices=[]), uncompiled():
            return _compare(optimizer, kinds, mesh)
    except _UntriedError as error:
        warnings.warn(
            f"{type(optimizer).__name__} could not be tried on copies of its parameters: it raised "
            f"{error} on ordinary tensors. Compare its training with that of one process.",
            stacklevel=6,
        )
    except _LostPeerError:
        pass  # the rank that failed says why
    finally:
        unpatch_for(mesh)
        close_mesh(mesh)
    return None


def _refusal(optimizer: torch.optim.Optimizer, where: str, problem: str) -> str:
    return (
        "Expected an optimizer that computes on sharded parameters what it computes on whole ones, "
        f"got {type(optimizer).__name__}: in trial steps on copies of {where}, {problem}. Use "
        "AdamW, SGD, Muon or another of torch.optim that the guide lists; or change its step: its "
        "parameters and gradients are DTensors, so make state with torch.zeros_like(parameter), "
        "and call .full_tensor() on norms, means and other values of whole tensors."
    )


def _compare(
    optimizer: torch.optim.Optimizer, kinds: Sequence[_Kind], mesh: DeviceMesh
) -> str | None:
    """Return what is wrong with steps on sharded copies, if anything."""
    draws = torch.Generator().manual_seed(0)
    starts = [_values(kind, draws) for kind in kinds]
    gradients = [[_values(kind, draws) for kind in kinds] for _ in range(_STEPS)]
    watch, closure = _Watch(), False  # type: ignore[no-untyped-call]
    try:
        with watch:
            whole = _run(optimizer, kinds, starts, gradients, None, closure=False)
    except Exception:
        closure = True
        try:
            with watch:
                whole = _run(optimizer, kinds, starts, gradients, None, closure=True)
        except Exception as error:
            raise _UntriedError(f"{type(error).__name__}: {_first_line(error)}") from error
    idle = all(torch.equal(p, s) for p, s in zip(_params(whole), starts, strict=True))
    if idle and all(group.get("lr") != 0 for group in optimizer.param_groups):
        return (
            "it changed nothing: it keeps parameters in other places than its param_groups, and "
            "those are not the sharded ones. Build it after the model is sharded"
        )
    try:
        parts = _run(optimizer, kinds, starts, gradients, mesh, closure=closure)
        return _difference(kinds, starts, whole, parts, watch.tolerance)
    except Exception as error:
        if _is_lost_peer(error):
            raise _LostPeerError from error
        return f"it raised {type(error).__name__}: {_first_line(error)}"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether values are computed in 16 bits."""

    tolerance = _TOLERANCE

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            self.tolerance = _TOLERANCE_16_BIT
        return result


def _values(kind: _Kind, draws: torch.Generator) -> torch.Tensor:
    """Draw values whose size grows along every dimension: parts look unlike the whole."""
    values = torch.randn(kind.shape, generator=draws)
    for index, size in enumerate(kind.shape):
        scale = torch.linspace(0.5, 2.0, size) if size > 1 else torch.ones(size)
        values *= scale.view([-1 if other == index else 1 for other in range(values.ndim)])
    return values.to(kind.parameter.dtype)


def _run(
    optimizer: torch.optim.Optimizer,
    kinds: Sequence[_Kind],
    starts: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    mesh: DeviceMesh | None,
    *,
    closure: bool,
) -> torch.optim.Optimizer:
    """Step copies of the parameters; return the optimizer that has done it."""
    torch.manual_seed(0)
    copies = [
        nn.Parameter(_spread(start.clone(), kind, mesh))
        for kind, start in zip(kinds, starts, strict=True)
    ]
    stand_in = _stand_in(optimizer, kinds, copies, mesh)
    for values in gradients:

        def set_gradients(values: Sequence[torch.Tensor] = values) -> torch.Tensor:
            for parameter, kind, value in zip(copies, kinds, values, strict=True):
                parameter.grad = _spread(value.clone(), kind, mesh)
            return torch.ones(())

        set_gradients()
        step: Any = type(stand_in).step
        step(stand_in, set_gradients) if closure else step(stand_in)
    return stand_in


def _spread(value: torch.Tensor, kind: _Kind, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None or kind.placements is None:
        return value
    return distribute_tensor(value, mesh, kind.placements, src_data_rank=None)


def _stand_in(
    optimizer: torch.optim.Optimizer,
    kinds: Sequence[_Kind],
    copies: Sequence[nn.Parameter],
    mesh: DeviceMesh | None,
) -> torch.optim.Optimizer:
    """Copy an optimizer, with the copies in the places of its parameters."""
    held: dict[int, list[torch.Tensor]] = defaultdict(list)
    memo: dict[int, Any] = {}
    for kind, parameter in zip(kinds, copies, strict=True):
        held[kind.group].append(kind.parameter)
        memo[id(kind.parameter)] = parameter
    own = {
        name: OrderedDict() if name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
        if name not in INSTANCE_ATTRIBUTES
    }
    own["param_groups"] = [
        {**optimizer.param_groups[number], "params": params} for number, params in held.items()
    ]
    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(stand_in).update(copy.deepcopy(own, memo))
    stand_in.state = defaultdict(dict)
    for kind, parameter in zip(kinds, copies, strict=True):
        if kind.parameter in optimizer.state:
            stand_in.state[parameter] = {
                key: _small_state(value, kind, mesh)
                for key, value in optimizer.state[kind.parameter].items()
            }
    for group in stand_in.param_groups:
        group.pop("param_names", None)
        if group.get("lr") == 0:  # a schedule that begins at 0
            group["lr"] = 1e-3
    return stand_in


def _small_state(value: Any, kind: _Kind, mesh: DeviceMesh | None) -> Any:
    """Copy a value that the optimizer's state has had before its first step here."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.shape == kind.parameter.shape and value.ndim:
        small = torch.ones(kind.shape, dtype=value.dtype)
        return _spread(small, kind, mesh) if isinstance(value, DTensor) else small
    return value.detach().to("cpu", copy=True)


def _difference(
    kinds: Sequence[_Kind],
    starts: Sequence[torch.Tensor],
    whole: torch.optim.Optimizer,
    parts: torch.optim.Optimizer,
    tolerance: float,
) -> str | None:
    found: list[str] = []
    pairs = zip(kinds, starts, _params(whole), _params(parts), strict=True)
    for kind, start, expected, got in pairs:
        moved = float((expected.detach() - start).abs().nan_to_num().max())
        allowed = tolerance * moved + 1e-6 * float(start.abs().max())
        if _off(got, expected, allowed):
            found.append(f"the values of {kind.name} came out unlike those of whole tensors")
        states = whole.state.get(expected, {}), parts.state.get(got, {})
        if states[0].keys() != states[1].keys():
            found.append(f"the state of {kind.name} has other keys")
            continue
        for key, value in states[0].items():
            if isinstance(value, torch.Tensor) and isinstance(states[1][key], torch.Tensor):
                problem = _state_problem(value, states[1][key], tolerance)
                if problem is not None:
                    found.append(f"state {key} of {kind.name} {problem}")
    for ours, theirs in zip(whole.param_groups, parts.param_groups, strict=True):
        for key, value in ours.items():
            if isinstance(value, float) and abs(value - theirs[key]) > tolerance * abs(value):
                found.append(f"the option {key} of a group differs")
    return found[0] if found else None


def _state_problem(expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> str | None:
    if got.shape != expected.shape:
        return f"has the shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    if expected.is_floating_point() and expected.numel():
        allowed = tolerance * float(expected.abs().nan_to_num().max())
        if _off(got, expected, allowed):
            return "came out unlike that of whole tensors"
    elif isinstance(got, DTensor):
        got.full_tensor()  # every rank takes part in it
    return None


def _off(got: torch.Tensor, expected: torch.Tensor, allowed: float) -> bool:
    value = (got.full_tensor() if isinstance(got, DTensor) else got).detach().double()
    wanted = expected.detach().double()
    if not torch.equal(value.isnan(), wanted.isnan()):
        return True
    return float((value - wanted).nan_to_num().abs().max()) > allowed


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def _is_lost_peer(error: Exception) -> bool:
    text = str(error)
    return any(mark in text for mark in ("gloo", "pair closure", "Connection closed by peer"))
