"""Activations in CPU memory between forward and backward.

What autograd saves is handed to hooks (`torch.autograd.graph.saved_tensors_hooks`). They copy the
memory behind a tensor once, however many operations and views save it, and let the original go;
the backward gets views of a copy that has come back:

    forward   unit 0 | unit 1 | unit 2 | head, loss   copies of unit 0 leave beside unit 1
    backward  loss | unit 2 | unit 1 | unit 0         those of unit 1 come back beside unit 2

Gathered parameters are left alone: FSDP2 frees them and gathers them again in the same storage,
which a copy would keep from being so. What the head and the loss save, after the last repeated
block, stays too: the backward begins with it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardplug.core._torch.tensors import version_of
from shardplug.core.activations.host_copies import Copies
from shardplug.core.activations.saved_tensors import Group, Leaving, Record, Saved, stretch_of
from shardplug.errors import ConfigError

__all__ = ["LEAST_BYTES", "ActivationOffload"]

LEAST_BYTES = 4096
"""Smaller tensors stay: moving one costs more than its memory is worth."""


class ActivationOffload:
    """Moves what autograd saves in one model's forward to CPU memory, and back in its backward.

    Args:
        copies: Copies from and to the device.
        device: Where activations are; tensors elsewhere are left alone.
        prefetch: Blocks that come back ahead of their backward.
        own_storages: Storages that stay, such as those of the root's parameters; asked for in
            each forward, once these are gathered.
    """

    def __init__(
        self,
        copies: Copies,
        device: torch.device,
        prefetch: int,
        own_storages: Callable[[], Iterable[torch.UntypedStorage]] = tuple,
    ) -> None:
        self._copies = copies
        self._device = device
        self._prefetch = prefetch
        self._own_storages = own_storages
        self._hooks: saved_tensors_hooks | None = None
        self._moves = False
        self._root_noted = False
        self._resident: dict[int, weakref.ref[Any]] = {}
        # By storage, begin and end: the storage, its version and the record of it.
        self._known: dict[
            tuple[int, int, int], tuple[weakref.ref[Any], int, weakref.ref[Record]]
        ] = {}
        self._last: Group | None = None
        self._group = Group(None)
        self._now, self._before = Leaving(), Leaving()
        self._out = self._back = 0
        self.last_step = (0, 0)
        """Bytes that the latest optimizer step's forwards copied to CPU memory, and that its
        backwards took back."""

    @property
    def held_bytes(self) -> int:
        """Bytes in CPU memory now."""
        records = {id(r): r for group in self._groups() for r in group.alive()}
        return sum(r.num_bytes for r in records.values() if r.host is not None)

    def end_step(self) -> None:
        """An optimizer has stepped: count anew."""
        self.last_step = (self._out, self._back)
        self._out = self._back = 0

    # ---------------------------------------------------------------- the forward

    def begin(self) -> None:
        """The outermost call into the model begins, with gradients."""
        self.end()  # of a call that something else than an Exception has ended
        while self._last is not None and not self._last.alive():
            self._last = self._last.previous
        self._group = Group(self._last)
        self._root_noted = False
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        try:
            hooks.__enter__()
        except RuntimeError as error:  # switched off, by torch.func's transforms for one
            raise ConfigError(
                'Expected a forward in which offload_activations="cpu" may move what is saved, '
                f"but torch's saved_tensors_hooks are switched off there ({error}). Leave the "
                "option out, or call the model outside of that context."
            ) from error
        self._moves = True
        self._hooks = hooks

    def end(self) -> None:
        """It has ended, or failed."""
        if self._hooks is None:
            return
        self._hooks.__exit__()
        self._hooks = None
        self._moves = False
        self._close_group()
        self._let_all_go()
        self._known.clear()

    def reset(self) -> None:
        """Forget a step that failed."""
        self.end()
        self._last = None
        self._group = Group(None)

    def enter_block(self) -> None:
        """A repeated block begins."""
        self._moves = self._hooks is not None

    def leave_block(self, is_last: bool) -> None:
        """A repeated block has ended; `is_last` of the blocks of the model."""
        if self._hooks is None:
            return  # recomputed in the backward, or called by itself
        self._close_group()
        self._moves = not is_last

    def keep(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Never move these."""
        for storage in storages:
            known = self._resident.get(id(storage))
            if known is None or known() is not storage:
                self._resident[id(storage)] = weakref.ref(storage)

    def _close_group(self) -> None:
        if self._group.records:
            self._last, self._group = self._group, Group(self._group)
        if self._now.originals:
            self._now.token = self._copies.mark()
            # One block later its copies are done, or nearly.
            self._let_go(self._before)
            self._before, self._now = self._now, Leaving()

    def _let_go(self, leaving: Leaving) -> None:
        """Drop originals, whose memory the next computation may take."""
        if leaving.originals:
            self._copies.wait(leaving.token)
        for record, original, version in leaving.originals:
            # Memory that was freed meanwhile, with its tensor alive, counts as changed too.
            shrunk = original.untyped_storage().nbytes() < record.begin + record.num_bytes
            record.changed = shrunk or version_of(original) != version
        leaving.originals.clear()

    def _let_all_go(self) -> None:
        if self._now.originals:
            self._now.token = self._copies.mark()
        self._let_go(self._before)
        self._let_go(self._now)

    def _groups(self) -> Iterator[Group]:
        group: Group | None = self._group
        while group is not None:
            yield group
            group = group.previous

    # ---------------------------------------------------------------- the hooks

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = self._storage_to_move(tensor) if self._moves else None
        if storage is None:
            return tensor.detach()  # the tensor itself would be held by its own graph
        begin, end = stretch_of(tensor, storage.nbytes())
        version = version_of(tensor)
        record = self._find(storage, (0, storage.nbytes()), version)
        record = record or self._find(storage, (begin, end), version)
        if record is None:
            record = self._move(tensor, storage, (begin, end), version)
        self._group.records.append(weakref.ref(record))
        return Saved(
            record,
            self._group,
            tensor.dtype,
            int(tensor.storage_offset()) - record.begin // tensor.itemsize,
            tensor.size(),
            tensor.stride(),
        )

    def _storage_to_move(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        if (
            type(tensor) is not torch.Tensor  # parameters, and classes with a memory of their own
            or tensor.device != self._device
            or tensor.layout is not torch.strided
            or tensor.nbytes < LEAST_BYTES
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_quantized
        ):
            return None
        if not self._root_noted:
            self._root_noted = True
            self.keep(self._own_storages())
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # one that a transform of functions has made
            return None
        known = self._resident.get(id(storage))
        if known is not None and known() is storage:
            return None
        # One whose memory has gone can only be a gathered parameter's.
        return storage if storage.nbytes() >= tensor.itemsize else None

    def _find(
        self, storage: torch.UntypedStorage, stretch: tuple[int, int], version: int
    ) -> Record | None:
        found = self._known.get((id(storage), *stretch))
        if found is None or found[0]() is not storage or found[1] != version:
            return None
        return found[2]()

    def _move(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        stretch: tuple[int, int],
        version: int,
    ) -> Record:
        begin, end = stretch
        flat = torch.empty(0, dtype=torch.uint8, device=self._device)
        flat.set_(storage, begin, (end - begin,), (1,))
        record = Record(self._copies.out(flat), begin)
        self._known[id(storage), begin, end] = (weakref.ref(storage), version, weakref.ref(record))
        self._out += record.num_bytes
        if self._copies.are_late:
            self._now.originals.append((record, tensor.detach(), version))
        return record

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, Saved):
            kept: torch.Tensor = saved
            return kept
        group, record = saved.group, saved.record
        if not group.entered:
            group.entered = True
            self._let_all_go()
            self._fetch(group.alive())
            ahead = group.previous
            for _ in range(self._prefetch):
                while ahead is not None and not ahead.alive():
                    ahead = ahead.previous
                if ahead is None:
                    break
                self._fetch(ahead.alive())
                ahead = ahead.previous
        self._fetch([record])
        assert record.device is not None
        if record.wait is not None:
            record.wait()
            record.used = True
        if record.changed:
            raise RuntimeError(
                "Expected a tensor that the backward needs to stay as it was saved, got one of "
                f"shape {list(saved.size)} that was modified by an inplace operation while it was "
                "copied to CPU memory. Make that operation out of place."
            )
        return saved.view_of(record.device)

    def _fetch(self, records: Sequence[Record]) -> None:
        away = [record for record in records if record.device is None]
        if not away:
            return
        for record in away:
            assert record.host is not None
            record.device, record.host = self._copies.back(record.host), None
            self._back += record.num_bytes
        if self._copies.are_late:
            wait = functools.partial(self._copies.wait, self._copies.mark())
            for record in away:
                record.wait = wait
