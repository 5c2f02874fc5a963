"""A tensor whose values live in a tier: touching it reads or writes them, explicitly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from shardplug.core._torch.tensors import (
    TensorWithoutMemory,
    multiply_all,
    tree_leaves,
    tree_map,
    written_tensors,
)
from shardplug.errors import StorageError

__all__ = ["Holder", "TierTensor", "in_tier"]

_aten = torch.ops.aten

_SAME: frozenset[Any] = frozenset({_aten.detach.default, _aten.alias.default})
"""Operations whose result is the tensor itself."""

_OVERWRITES: frozenset[Any] = frozenset(
    {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor}
)
"""Operations that replace all values, so that the old ones need not be read."""

_LAYOUT_ONLY: frozenset[Any] = frozenset(
    {
        _aten.empty_like.default,
        _aten.full_like.default,
        _aten.is_pinned.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.new_full.default,
        _aten.new_ones.default,
        _aten.new_zeros.default,
        _aten.ones_like.default,
        _aten.rand_like.default,
        _aten.randn_like.default,
        _aten.zeros_like.default,
    }
)
"""Operations that look at shape and dtype, not at values."""


class Holder(Protocol):
    """Keeps one tensor's values in a tier."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def read(self) -> torch.Tensor:
        """Return a copy of the values, contiguous, on `device`.

        Raises:
            StorageError: When they cannot be read.
        """

    def write(self, values: torch.Tensor) -> None:
        """Replace the values.

        Args:
            values: Of the holder's shape and dtype.

        Raises:
            StorageError: When they cannot be written.
        """

    def write_rows(self, first: int, values: torch.Tensor) -> None:
        """Replace the rows from `first` on.

        Args:
            first: Index on dimension 0.
            values: (rows, ...), of the holder's dtype.

        Raises:
            StorageError: When they cannot be written.
        """


class TierTensor(TensorWithoutMemory):
    """Has a shape and a dtype, and no memory.

    Whatever torch does with it reads the values first, as a copy, and writes back what the
    operation changed: the result is right, and costs the tier's time and the tensor's memory for
    as long as the copy lives. A view of it has no memory either, and is taken anew each time.

    Args:
        holder: Where the values are.
    """

    holder: Holder
    changes: int = 0
    """How often the values were replaced so far, where that is counted."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # noqa: D105
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, not the place."""
        return self.holder.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    # Of these torch returns the tensor itself where nothing has to be done; who calls them wants
    # values that are there.

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the values, converted."""
        return self.holder.read().to(*args, **kwargs)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the values on the CPU."""
        return self.holder.read().cpu(*args, **kwargs)

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the values in memory."""
        return self.holder.read().contiguous(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of the values as an array."""
        return self.holder.read().numpy(*args, **kwargs)

    def data_ptr(self) -> int:
        """Refuse: there is no memory to point to.

        Raises:
            StorageError: Always.
        """
        raise StorageError(
            f"Expected a tensor in memory, got one of shape {tuple(self.shape)} whose values rest "
            "in a tier: take a copy of it with .clone()."
        )

    def same(self) -> TierTensor:
        """Return another tensor for the same values."""
        return type(self)(self.holder)  # shares what is known of the values with this one

    def scale(self, factor: float) -> None:
        """Multiply the values by a number, as clipping does in memory."""
        values = self.holder.read()
        multiply_all([values], factor)
        self.holder.write(values)

    def p_norm(self, norm_type: float) -> torch.Tensor:
        """Return the p-norm of the values, float64 of shape ()."""
        values = self.holder.read()
        dtype = torch.complex128 if values.is_complex() else torch.float64
        norm: torch.Tensor = torch.linalg.vector_norm(values, norm_type, dtype=dtype)
        return norm

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Replace the elements that are not `rows`, cast to its dtype.

        Args:
            rows: Of this tensor's shape; may have a lower dtype, which the other elements do not
                lose precision to.

        Raises:
            StorageError: When they cannot be read or written.
        """
        values = self.holder.read()
        rows = rows.view(self.shape)
        changed = rows != values.to(rows.dtype)
        self.holder.write(torch.where(changed, rows.to(values.dtype), values))

    def change_in_place(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Carry out an operation that changes this tensor without reading it.

        Returns:
            Whether that was possible; the values are read, changed and written otherwise.
        """
        return False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation on the real values."""
        kwargs = kwargs or {}
        if func in _SAME or (func is _aten.view.default and tuple(args[1]) == tuple(args[0].shape)):
            return args[0].same()
        if func in _LAYOUT_ONLY:
            stands_in = _map(lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device))
            return func(*tree_map(stands_in, args), **tree_map(stands_in, kwargs))
        if func.is_view:
            return _view(func, args, kwargs)
        changed = written_tensors(func, args, kwargs)
        written = [tensor for tensor in changed if isinstance(tensor, TierTensor)]
        if len(written) == 1 and args and written[0] is args[0]:
            if args[0].change_in_place(func, args, kwargs):
                return args[0]
        return _on_copies(func, args, kwargs, written)


class _View:
    """Holds a view of what another holder has.

    Args:
        base: The other holder.
        take: Takes the view of a tensor like the base's.
        like: Has the view's shape.
    """

    def __init__(
        self, base: Holder, take: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
    ) -> None:
        self._base = base
        self._take = take
        self.shape, self.dtype, self.device = like.shape, like.dtype, base.device

    def read(self) -> torch.Tensor:
        return self._take(self._base.read()).contiguous()

    def write(self, values: torch.Tensor) -> None:
        self._change(lambda view: view.copy_(values))

    def write_rows(self, first: int, values: torch.Tensor) -> None:
        self._change(lambda view: view[first : first + values.shape[0]].copy_(values))

    def _change(self, change: Callable[[torch.Tensor], object]) -> None:
        whole = self._base.read()
        change(self._take(whole))
        self._base.write(whole)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    base = args[0].holder

    def all_of(tensor: torch.Tensor) -> Any:
        return func(tensor, *args[1:], **kwargs)

    def take(index: int, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = tree_leaves(all_of(tensor))[index]
        return found

    outline = all_of(torch.empty(base.shape, dtype=base.dtype, device="meta"))
    numbers = iter(range(len(tree_leaves(outline))))
    return tree_map(
        lambda like: TierTensor(_View(base, functools.partial(take, next(numbers)), like)), outline
    )


def _on_copies(func: Any, args: Any, kwargs: Any, written: list[TierTensor]) -> Any:
    copies: dict[int, torch.Tensor] = {}
    fresh = {id(t) for t in written} if func in _OVERWRITES else set()

    def copy_of(tensor: TierTensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = (
                torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                if id(tensor) in fresh
                else tensor.holder.read()
            )
        return copies[id(tensor)]

    real = _map(copy_of)
    result = func(*tree_map(real, args), **tree_map(real, kwargs))
    for tensor in written:
        tensor.holder.write(copies[id(tensor)])
    originals = {id(copies[id(tensor)]): tensor for tensor in written}
    return tree_map(lambda value: originals.get(id(value), value), result)


def _map(action: Callable[[TierTensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda value: action(value) if isinstance(value, TierTensor) else value


def in_tier(tensor: torch.Tensor) -> TierTensor | None:
    """Return the tensor if its values live in a tier."""
    return tensor if isinstance(tensor, TierTensor) else None
