"""Keeps what user code writes to parameters while they are gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardplug.core._torch.groups import (
    elements_before,
    gathered_copy,
    gathered_memory,
    is_stood_in,
    label_of,
    own_groups,
    own_rows,
    places_of,
    unit_groups,
)
from shardplug.core._torch.resharding import around_gathers, gather_again_after, stays_gathered
from shardplug.core._torch.tensors import local_tensor
from shardplug.core.gathered.fingerprint import (
    Fingerprint,
    changed_since,
    fingerprint,
    placed_like,
    same_bits,
    same_bytes,
)
from shardplug.core.tier_tensor import TierTensor, in_tier
from shardplug.errors import ModelError, ScheduleError

__all__ = ["GatheredWrites", "merge_rows"]

_CHUNK = 2**18
"""Elements compared at a time: what is cast for it stays in the processor's cache."""

_MODIFY = "Change weights inside `with engine.gathered(part, modify=True):`."


@dataclass(slots=True)
class _AtGather:
    """What is remembered of one parameter from its gather on."""

    rows: Fingerprint | None = None
    """Of this rank's rows of the gathered copy, where they are not the shard's own bits."""
    shard: Fingerprint | None = None
    changes: int = 0
    """How often the values in a tier had been replaced."""


class GatheredWrites:
    """Takes writes to gathered copies over into the shards, before the copies are dropped.

    This rank's rows of a copy are compared with the shard that they were gathered from. Elements
    that differ are copied to the shard; the others keep the precision of the master weights. Each
    rank keeps its own rows: ranks that write different values each contribute their rows.

    A copy that outlives its unit's forward (the root's, and all at stages 1 and 2) may be older
    than its shard. Sums of the bits, taken at the gather, tell which of the two has changed. They
    are looked at where the two differ. On accelerators nothing of it waits for the device.

    Args:
        root: The sharded model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._at_gather: dict[Any, _AtGather] = {}
        self._dropped: set[Any] = set()
        self._modified: set[Any] = set()
        self._refused: list[tuple[str, torch.Tensor]] = []
        self._problems: list[str] | None = None
        for _, group in unit_groups(root):
            around_gathers(
                group,
                functools.partial(self._before_gather, group),
                functools.partial(self._gathered, group),
                functools.partial(self._dropping, group),
            )

    # ---------------------------------------------------------------- around a gather

    def _before_gather(self, group: Any) -> None:
        if self._modified and not self._modified.isdisjoint(group.fsdp_params):
            raise ScheduleError(
                "Expected no forward and no other gather while parameters are changed "
                "(gathered(modify=True)), found one: it would compute with the old values. Leave "
                "the context first."
            )

    def set_modified(self, params: Iterable[Any]) -> None:
        """Refuse gathers of these parameters; none of them to admit all again."""
        self._modified = set(params)

    def is_modified(self, param: Any) -> bool:
        """Whether a parameter is being changed in `gathered(modify=True)`."""
        return param in self._modified

    @property
    def is_modifying(self) -> bool:
        """Whether parameters are being changed in `gathered(modify=True)`."""
        return bool(self._modified)

    @torch.no_grad()
    def _gathered(self, group: Any) -> None:
        long_lived = stays_gathered(group)
        for param in group.fsdp_params:
            whole, shard = gathered_copy(param), local_tensor(param.sharded_param)
            assert whole is not None
            now = _AtGather()
            resting = in_tier(shard)
            elsewhere = resting is not None or shard.device != whole.device
            same = shard.is_cpu and shard.dtype == whole.dtype
            if elsewhere or (long_lived and not same):
                now.rows = fingerprint(own_rows(param, local_tensor(whole)))
            if resting is not None:
                now.changes = resting.changes
            elif long_lived:
                now.shard = fingerprint(shard)
            self._at_gather[param] = now

    @torch.no_grad()
    def _dropping(self, group: Any) -> Callable[[], None]:
        """Take writes over; return what reports those that cannot be kept, once all is sharded."""
        problems: list[str] = []
        plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        for param in group.fsdp_params:
            before, whole = self._at_gather.pop(param, None), gathered_copy(param)
            if before is None or whole is None or _is_untouched(param, whole):
                continue
            problem, rows = None, None
            if param not in self._dropped:
                problem = _misplaced(param, whole)
                rows = None if problem else _rows_of(param, whole)
            shard = local_tensor(param.sharded_param)
            if rows is not None and in_tier(shard) is None and shard.device == rows.device:
                if before.rows is None and not rows.is_cpu:
                    plain.append((rows, shard))
                else:
                    problem = self._keep(rows, shard, before)
            elif rows is not None:
                problem = self._keep_elsewhere(param, rows, shard, before)
            _put_memory_back(param, whole)
            if problem:
                problems.append(f"{label_of(param)} {problem}")
        self._dropped.difference_update(group.fsdp_params)
        if plain:
            _merge_on_device(plain)
        if any(not local_tensor(param.sharded_param).is_cpu for param in group.fsdp_params):
            gather_again_after(group)
        if self._problems is not None:
            self._problems += problems
            problems = []
        return functools.partial(_raise, problems)

    @contextmanager
    def reported_at_end(self) -> Iterator[None]:
        """Raise for writes that cannot be kept when the context ends, with all of it done.

        Raises:
            ModelError: Naming the parameters.
        """
        self._problems = []
        try:
            yield
        finally:
            problems, self._problems = self._problems, None
        _raise(problems)

    def _keep(self, rows: torch.Tensor, shard: torch.Tensor, before: _AtGather) -> str | None:
        if before.shard is None:
            merge_rows(rows, shard)
            return None
        if before.rows is not None and not rows.is_cpu:
            keep = changed_since(rows, before.rows) & ~changed_since(shard, before.shard)
            shard.copy_(torch.where(keep & (rows != shard.to(rows.dtype)), rows.to(shard), shard))
            return None
        if before.rows is not None:
            written = changed_since(rows, before.rows)
        else:
            written = changed_since(placed_like(rows, shard), before.shard)
        if not written:
            return None
        if changed_since(shard, before.shard):
            return (
                "was written to while it was gathered, and its shard was changed meanwhile (by an "
                "optimizer or through a reference from before)"
            )
        merge_rows(rows, shard)
        return None

    def _keep_elsewhere(
        self, param: Any, rows: torch.Tensor, shard: torch.Tensor, before: _AtGather
    ) -> str | None:
        assert before.rows is not None
        written = changed_since(rows, before.rows)
        if not rows.is_cpu:
            self._refused.append((label_of(param), written))
            return None
        if not written:
            return None
        if isinstance(shard, TierTensor):
            if shard.changes != before.changes:
                return "was written to while it was gathered, and its values in the tier as well"
            shard.keep_rows(rows)
        else:
            merge_rows(rows, shard)
        return None

    def raise_refused(self) -> None:
        """Raise for writes on an accelerator to parameters that rest elsewhere.

        Waits for the device where there are such parameters; call it once per step.

        Raises:
            ModelError: Naming the parameters.
        """
        refused, self._refused = self._refused, []
        if not refused:
            return
        flags = torch.stack([flag for _, flag in refused]).tolist()
        names = dict.fromkeys(name for (name, _), flag in zip(refused, flags, strict=True) if flag)
        _raise(
            [f"{name} was written to while it was gathered, and rests elsewhere" for name in names]
        )

    # ---------------------------------------------------------------- gathered() to read

    def watch(self, units: Sequence[Any]) -> dict[Any, Fingerprint]:
        """Remember the gathered copies of units, for `written`."""
        return {
            param: fingerprint(local_tensor(whole))
            for unit in units
            for group in own_groups(unit)
            for param in group.fsdp_params
            if (whole := gathered_copy(param)) is not None and param in self._at_gather
        }

    def drop_written(self, watched: dict[Any, Fingerprint]) -> list[str]:
        """Return the names of parameters that were written to since; these writes are dropped."""
        names = []
        for param, before in watched.items():
            whole = gathered_copy(param)
            assert whole is not None
            if param not in self._at_gather:
                continue  # dropped meanwhile, with what was written
            changed = _misplaced(param, whole) or (
                bool(changed_since(whole.detach().contiguous(), before))
            )
            if changed:
                self._dropped.add(param)
                if not any(renormalises(module) for module, _ in places_of(param)):
                    names.append(label_of(param))
        return names


def renormalises(module: nn.Module) -> bool:
    """Whether a module's forward scales rows of its weight down (`max_norm`)."""
    return (
        isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and getattr(module, "max_norm", None) is not None
    )


def _is_untouched(param: Any, whole: nn.Parameter) -> bool:
    """Whether a copy in CPU memory stands where it was put, and its rows are the shard's bits.

    It is asked of each parameter twice a step. False where it takes more to know.
    """
    shard, memory = local_tensor(param.sharded_param), param.all_gather_outputs[0]
    if in_tier(shard) is not None or not (shard.is_cpu and memory.is_cpu):
        return False
    start = memory.data_ptr()
    if (
        not (whole.dtype == shard.dtype == memory.dtype)
        or whole.data_ptr() != start
        or whole.shape != param.sharded_param.shape
        or not whole.is_contiguous()
        or any(module._parameters.get(name) is not whole for module, name in places_of(param))
    ):
        return False
    first = start + elements_before(param) * shard.element_size()
    return same_bytes(first, shard.data_ptr(), shard.nbytes)


def _misplaced(param: Any, whole: nn.Parameter) -> str | None:
    """Say what is wrong with what stands in the modules for a gathered parameter."""
    for module, name in () if is_stood_in(param) else places_of(param):
        now = module._parameters.get(name)
        if now is not whole and now is not param.sharded_param:
            return "was replaced by another parameter while it was gathered"
    if _misshapen(param, whole):
        shape, dtype = param.sharded_param.shape, param.all_gather_outputs[0].dtype
        return (
            f"was given data of shape {tuple(whole.shape)} and {whole.dtype} while it was "
            f"gathered, in place of {tuple(shape)} and {dtype}"
        )
    return None


def _misshapen(param: Any, whole: nn.Parameter) -> bool:
    shape, dtype = param.sharded_param.shape, param.all_gather_outputs[0].dtype
    return bool(whole.shape != shape or whole.dtype != dtype)


def _rows_of(param: Any, whole: nn.Parameter) -> torch.Tensor:
    """Return this rank's rows of a gathered copy, contiguous, where it is gathered."""
    return own_rows(param, whole.detach()).to(param.all_gather_outputs[0].device).contiguous()


def _put_memory_back(param: Any, whole: nn.Parameter) -> None:
    """Let the next gather be seen, after `parameter.data = tensor` on a gathered one."""
    if whole.data_ptr() != param.all_gather_outputs[0].data_ptr() or _misshapen(param, whole):
        whole.data = gathered_memory(param)


def _raise(problems: list[str]) -> None:
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise ModelError(
            "Expected writes to gathered parameters that can be kept, but "
            f"{'; '.join(problems[:4])}{more}. {_MODIFY}"
        )


def merge_rows(rows: torch.Tensor, shard: torch.Tensor) -> None:
    """Copy the elements of `rows` that are not `shard`, cast, into it. In memory.

    Args:
        rows: Contiguous, in the dtype that the parameter was gathered in.
        shard: Of the same shape, contiguous, in the dtype of the master weights.
    """
    if rows.dtype == shard.dtype:
        if not rows.is_cpu or not same_bits(rows, shard):
            shard.copy_(rows)
        return
    parts = (torch.split(t.detach().view(-1), _CHUNK) for t in (rows, shard))
    for new, old in zip(*parts, strict=True):
        low = old.to(new.dtype)
        if not new.is_cpu or not same_bits(new, low):
            old.copy_(torch.where(new != low, new.to(old.dtype), old))


def _merge_on_device(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Do `merge_rows` for many parameters in few kernels."""
    kinds: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for rows, shard in pairs:
        kinds.setdefault((rows.dtype, shard.dtype), []).append((rows, shard))
    for (low, high), some in kinds.items():
        new = torch.cat([rows.reshape(-1) for rows, _ in some])
        old = torch.cat([shard.detach().reshape(-1) for _, shard in some])
        merged = torch.where(new != old.to(low), new.to(high), old)
        targets = [shard.detach().view(-1) for _, shard in some]
        parts = torch.split(merged, [t.numel() for t in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)
