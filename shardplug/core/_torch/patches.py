"""Methods of DTensor and optimizers that are replaced, as torch's give wrong values for shards."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import _muon
from torch.utils._pytree import tree_leaves

from shardplug.core._torch.tensors import ShardNotes, share_memory

__all__ = ["assign_data", "patch_for", "unpatch_for"]

_GUARDED = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__complex__")


_CHANGED_IN_PLACE = tuple(
    f"{name}_"
    for name in (
        *("abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "div", "exp"),
        *("lerp", "log", "mul", "nan_to_num", "neg", "pow", "reciprocal", "rsqrt", "sqrt", "sub"),
    )
) + ("__iadd__", "__imul__", "__isub__", "__itruediv__")


_EXTREMES = {"max": "max", "amax": "max", "min": "min", "amin": "min"}


_PARTS = ("__getitem__", "narrow", "select")


_WRITTEN = ("copy_", "fill_", "zero_")


_RANDOM = ("bernoulli_", "cauchy_", "exponential_", "log_normal_", "normal_", "random_", "uniform_")


_BY_INDEX = (
    *("__setitem__", "fill_diagonal_", "index_add_", "index_copy_", "index_fill_", "index_put_"),
    *("masked_scatter_", "put_", "scatter_", "scatter_add_"),
)


_MODIFY = "Change weights inside `with engine.gathered(part, modify=True, src=0):`."

_meshes: Counter[DeviceMesh] = Counter()
"""Meshes of the engines that are open: what is replaced concerns tensors on these alone."""

_replaced: list[tuple[Any, str, Any, Any]] = []
"""Where something was replaced, by which name, with what, and what was there, if anything was."""

_INHERITED = object()

_assigned = ShardNotes()
"""What takes over a tensor that is assigned to `parameter.data`."""


def patch_for(mesh: DeviceMesh, on_mixed_scalar: Callable[[Iterable[Any], str], None]) -> None:
    """Make values of sharded tensors on a mesh right, or an error, where torch's are neither.

    `parameter.norm()` on a sharded parameter is a DTensor whose ranks each hold their own part;
    torch's `.item()` would return that part with no error, and differently on each rank: it raises.
    Such a tensor is reduced before it is changed in place, which torch refuses. The largest and the
    smallest value of a tensor leave ranks without rows out, where torch raises on those ranks
    alone. Two things raise, as they would do something else than on a whole tensor: random numbers,
    which CPU ranks would draw alike for different rows, and writes to rows or slices of a shard,
    which DTensor copies. `torch.optim.Muon` gets whole matrices.

    Args:
        mesh: The mesh. Tensors on other meshes are left to torch.
        on_mixed_scalar: Called before an operation on a DTensor and a plain scalar that needs a
            gradient, with the tensors and the operation's name. DTensor takes such scalars, and
            the backward then fails where the scalar was computed.
    """
    _meshes[mesh] += 1
    if _replaced:
        return
    guards: dict[str, Callable[..., Callable[..., Any]]] = {
        **dict.fromkeys(_PARTS, _part_of_shards),
        **dict.fromkeys(_WRITTEN, _refused_on_parts),
        **dict.fromkeys(_RANDOM, _refused_on_shards),
        **dict.fromkeys(_CHANGED_IN_PLACE, _reduced_first),
        **dict.fromkeys(_BY_INDEX, _advised),
        **dict.fromkeys(_EXTREMES, _extreme),
        **dict.fromkeys(_GUARDED, _guarded),
    }
    for name, guard in guards.items():
        original = getattr(DTensor, name, None)
        if original is not None:
            _replace(DTensor, name, _on_open_meshes(original, guard(name, original)))
    plain: Any = torch.Tensor.data
    _replace(DTensor, "data", property(plain.__get__, _assign))
    from torch.distributed.tensor._dispatch import OpDispatcher

    name = "_unwrap_to_op_info_impl"
    _replace(OpDispatcher, name, _checked_dispatch(getattr(OpDispatcher, name), on_mixed_scalar))
    name = "_dispatch_get_local_results_slow_path"
    if hasattr(OpDispatcher, name):  # as of torch 2.12
        _replace(OpDispatcher, name, _refusing_to_draw(getattr(OpDispatcher, name)))
    name = "_zeropower_via_newtonschulz"
    _replace(_muon, name, _whole_matrices(getattr(_muon, name)))


def unpatch_for(mesh: DeviceMesh) -> None:
    """Undo one `patch_for`; with the last one torch is as it was."""
    global _meshes
    _meshes[mesh] -= 1
    _meshes = +_meshes
    if _meshes:
        return
    while _replaced:
        owner, name, replacement, original = _replaced.pop()
        if vars(owner).get(name) is not replacement:
            continue  # somebody else has replaced it since
        if original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.append((owner, name, replacement, vars(owner).get(name, _INHERITED)))
    setattr(owner, name, replacement)


def _on_open_meshes(
    original: Callable[..., Any], replacement: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        ours = self.device_mesh in _meshes
        return (replacement if ours else original)(self, *args, **kwargs)

    return method


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if any(placement.is_partial() for placement in self.placements):
            raise RuntimeError(
                f"Expected a value that is the same on every rank, got {name}() of a tensor that "
                f"is only partly reduced (placements {self.placements}): this rank would read its "
                "own part. Call .full_tensor() on it first, on every rank; for gradient norms use "
                "engine.grad_norm()."
            )
        return original(self, *args, **kwargs)

    return read


def _is_shard(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    return mesh.size() > 1 and any(placement.is_shard() for placement in tensor.placements)


def _part_of_shards(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def part(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # With a tensor or a list for an index the result is a copy of any tensor.
        keys = args[0] if name == "__getitem__" and args else None
        simple = all(
            key is None or key is Ellipsis or isinstance(key, (int, slice))
            for key in (keys if isinstance(keys, tuple) else (keys,))
        )
        if simple and isinstance(result, DTensor) and _is_shard(self):
            result._shardplug_part = not share_memory(  # type: ignore[attr-defined]
                result._local_tensor, self._local_tensor
            )
        return result

    return part


def _refuse_parts(tensor: DTensor, name: str) -> None:
    if getattr(tensor, "_shardplug_part", False):
        raise RuntimeError(
            f"Expected whole parameters to be changed, got {name}() of rows or a slice of a "
            "sharded one (DTensor): that is a copy, and the parameter would stay as it is. "
            f"{_MODIFY}"
        )


def _refused_on_parts(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(self, name)
        return original(self, *args, **kwargs)

    return write


def _refuse_to_draw(tensor: DTensor, name: str) -> None:
    """Refuse random numbers for a shard: CPU ranks would draw alike for different rows."""
    if tensor.device_mesh.device_type == "cpu" and _is_shard(tensor):
        raise RuntimeError(
            f"Expected random numbers to be drawn for whole parameters, got {name} on a sharded "
            f"one (DTensor): each rank would draw the same for its rows. {_MODIFY}"
        )


def _refused_on_shards(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(self, name)
        _refuse_to_draw(self, name)
        return original(self, *args, **kwargs)

    return draw


def _refusing_to_draw(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for functions that draw, like `torch.randn_like`."""

    @functools.wraps(original)
    def run(self: Any, op: Any, args: Any, *rest: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in op.tags:
            for tensor in args:
                if isinstance(tensor, DTensor) and tensor.device_mesh in _meshes:
                    _refuse_to_draw(tensor, str(op))
        return original(self, op, args, *rest)

    return run


def _advised(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Say what to do where torch has no rule for a write to a shard."""

    def write(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except RuntimeError as error:
            raise RuntimeError(f"{name}() of a sharded parameter: {error} {_MODIFY}") from error

    return write


def _reduced_first(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def change(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(self, name)
        partial = any(placement.is_partial() for placement in self.placements)
        if partial and not self.requires_grad:
            whole = self.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in self.placements]
            )
            self._local_tensor, self._spec = whole._local_tensor, whole._spec
        return original(self, *args, **kwargs)

    return change


def _extreme(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        local = self._local_tensor
        if args or kwargs or local.numel() or not self.numel() or self.requires_grad:
            return original(self, *args, **kwargs)
        if local.is_floating_point():
            lowest, highest = float("-inf"), float("inf")
        else:
            lowest, highest = torch.iinfo(local.dtype).min, torch.iinfo(local.dtype).max
        none = lowest if _EXTREMES[name] == "max" else highest
        placements = [Partial(_EXTREMES[name]) if p.is_shard() else p for p in self.placements]
        return DTensor.from_local(
            local.new_full((), none), self.device_mesh, placements, run_check=False
        )

    return read


def assign_data(param: Any, take: Callable[[torch.Tensor], None]) -> None:
    """Let `parameter.data = tensor` call `take(tensor)` for the shard of one of FSDP2's parameters.

    torch would exchange what a DTensor seems to be, and leave its local part as it was.
    """
    _assigned.set(param, take)


def _assign(self: DTensor, value: torch.Tensor) -> None:
    found = _assigned.get(self)
    if found is None:
        plain: Any = torch.Tensor.data
        plain.__set__(self, value)
    else:
        found(value)


def _checked_dispatch(
    original: Callable[..., Any], on_mixed_scalar: Callable[[Iterable[Any], str], None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(self: Any, op: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        returns = (str(value.type) for value in op._schema.returns)
        if torch.is_grad_enabled() and any("Tensor" in kind for kind in returns):
            tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
            plain = (t for t in tensors if not isinstance(t, DTensor))
            if any(t.requires_grad and not t.ndim for t in plain) and any(
                isinstance(t, DTensor) and t.device_mesh in _meshes for t in tensors
            ):  # torch refuses tensors that are no scalars itself
                on_mixed_scalar(tensors, str(op))
        return original(self, op, args, kwargs, *rest)

    return checked


def _whole_matrices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bring the rows of a sharded matrix together before Muon's iteration.

    The Newton-Schulz iteration is not elementwise, and in bf16 it enlarges what is small. Left to
    DTensor, its products are summed in another order than in one process, which the update shows
    in its third digit. Every rank works on the whole matrix instead, gathered once, in the
    iteration's own dtype, and keeps its rows.
    """

    @functools.wraps(original)
    def whole(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(grad, DTensor) or grad.device_mesh not in _meshes:
            return cast(torch.Tensor, original(grad, *args, **kwargs))
        half = cast(DTensor, grad.bfloat16())
        result = original(half.full_tensor(), *args, **kwargs)
        # None: every rank has the same values, so that each cuts its rows out by itself.
        return distribute_tensor(result, grad.device_mesh, grad.placements, src_data_rank=None)

    return whole
