"""Methods of DTensor and optimizers that are replaced, as torch's give wrong values for shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import _muon
from torch.utils._pytree import tree_leaves

from shardplug.core._torch.tensors import share_memory

__all__ = ["before_mixed_scalars", "guard_partial_reads", "orthogonalise_whole_matrices"]

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


_MODIFY = "Change weights inside `with engine.gathered(part, modify=True, src=0):`."


def guard_partial_reads() -> None:
    """Make values of whole sharded tensors right, or an error, where torch's are neither.

    `parameter.norm()` on a sharded parameter is a DTensor whose ranks each hold their own part;
    torch's `.item()` would return that part with no error, and differently on each rank: it raises.
    Such a tensor is reduced before it is changed in place, which torch refuses. The largest and the
    smallest value of a tensor leave ranks without rows out, where torch raises on those ranks
    alone. Two kinds of writes raise, as they would do something else than on a whole tensor:
    random numbers, which CPU ranks would draw alike for different rows, and writes to rows or
    slices of a shard, which DTensor copies.
    """
    guards: dict[str, Callable[..., Callable[..., Any]]] = {
        **dict.fromkeys(_PARTS, _part_of_shards),
        **dict.fromkeys(_WRITTEN, _refused_on_parts),
        **dict.fromkeys(_CHANGED_IN_PLACE, _reduced_first),
        **dict.fromkeys(_RANDOM, _refused_on_shards),
        **dict.fromkeys(_EXTREMES, _extreme),
        **dict.fromkeys(_GUARDED, _guarded),
    }
    for name, guard in guards.items():
        original = getattr(DTensor, name, None)
        if original is not None and not getattr(original, "_shardplug_guard", False):
            setattr(DTensor, name, guard(name, original))


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if any(placement.is_partial() for placement in self.placements):
            raise RuntimeError(
                f"Expected a value that is the same on every rank, got {name}() of a tensor that "
                f"is only partly reduced (placements {self.placements}): this rank would read its "
                "own part. Call .full_tensor() on it first, on every rank; for gradient norms use "
                "engine.grad_norm()."
            )
        return original(self, *args, **kwargs)

    read._shardplug_guard = True  # type: ignore[attr-defined]
    return read


def _is_shard(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    return mesh.size() > 1 and any(placement.is_shard() for placement in tensor.placements)


def _part_of_shards(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
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

    part._shardplug_guard = True  # type: ignore[attr-defined]
    return part


def _refuse_parts(tensor: DTensor, name: str) -> None:
    if getattr(tensor, "_shardplug_part", False):
        raise RuntimeError(
            f"Expected whole parameters to be changed, got {name}() of rows or a slice of a "
            "sharded one (DTensor): that is a copy, and the parameter would stay as it is. "
            f"{_MODIFY}"
        )


def _refused_on_parts(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def write(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(self, name)
        return original(self, *args, **kwargs)

    write._shardplug_guard = True  # type: ignore[attr-defined]
    return write


def _refused_on_shards(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(self, name)
        if self.device_mesh.device_type == "cpu" and _is_shard(self):
            raise RuntimeError(
                f"Expected random numbers to be drawn for whole parameters, got {name}() on a "
                f"sharded one (DTensor): each rank would draw the same for its rows. {_MODIFY}"
            )
        return original(self, *args, **kwargs)

    draw._shardplug_guard = True  # type: ignore[attr-defined]
    return draw


def _reduced_first(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def change(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(self, name)
        partial = any(placement.is_partial() for placement in self.placements)
        if partial and not self.requires_grad:
            whole = self.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in self.placements]
            )
            self._local_tensor, self._spec = whole._local_tensor, whole._spec
        return original(self, *args, **kwargs)

    change._shardplug_guard = True  # type: ignore[attr-defined]
    return change


def _extreme(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
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

    read._shardplug_guard = True  # type: ignore[attr-defined]
    return read


def before_mixed_scalars(action: Callable[[Iterable[Any], str], None]) -> None:
    """Call `action` before an operation on a DTensor and a plain scalar that needs a gradient.

    DTensor takes such scalars, and the backward then fails where the scalar was computed.

    Args:
        action: Gets the tensors and the name of the operation, and may raise.
    """
    from torch.distributed.tensor._dispatch import OpDispatcher

    dispatcher: Any = OpDispatcher
    original = dispatcher._unwrap_to_op_info_impl
    if getattr(original, "_shardplug_guard", False):
        return

    @functools.wraps(original)
    def checked(self: Any, op: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        returns = (str(value.type) for value in op._schema.returns)
        if torch.is_grad_enabled() and any("Tensor" in kind for kind in returns):
            tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
            plain = (t for t in tensors if not isinstance(t, DTensor))
            if any(t.requires_grad and not t.ndim for t in plain):  # torch refuses others itself
                action(tensors, str(op))
        return original(self, op, args, kwargs, *rest)

    checked._shardplug_guard = True  # type: ignore[attr-defined]
    dispatcher._unwrap_to_op_info_impl = checked


def orthogonalise_whole_matrices() -> None:
    """Let torch.optim.Muon bring the rows of a sharded matrix together before its iteration.

    The Newton-Schulz iteration is not elementwise, and in bf16 it enlarges what is small. Left to
    DTensor, its products are summed in another order than in one process, which the update shows
    in its third digit. Every rank works on the whole matrix instead, gathered once, in the
    iteration's own dtype, and keeps its rows.
    """
    original = _muon._zeropower_via_newtonschulz
    if getattr(original, "_shardplug_whole", False):
        return

    @functools.wraps(original)
    def whole(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(grad, DTensor):
            return original(grad, *args, **kwargs)
        half = cast(DTensor, grad.bfloat16())
        result = original(half.full_tensor(), *args, **kwargs)
        # None: every rank has the same values, so that each cuts its rows out by itself.
        return distribute_tensor(result, grad.device_mesh, grad.placements, src_data_rank=None)

    whole._shardplug_whole = True  # type: ignore[attr-defined]
    _muon._zeropower_via_newtonschulz = whole
