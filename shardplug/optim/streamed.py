"""An optimizer whose state lives outside the device and comes to the parameters block by block."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import torch.distributed as dist

from shardplug.collective import raise_together
from shardplug.core._torch.tensors import copies_of_all, local_tensor
from shardplug.errors import OptimizerError, StorageError
from shardplug.optim.blocks import Block, Piece
from shardplug.optim.classes import Runner, is_like
from shardplug.optim.journal import Journal
from shardplug.optim.state import ParameterState, StreamedState
from shardplug.optim.step import replace_step, step_is_replaced
from shardplug.optim.store import Store
from shardplug.optim.weights import StoredWeights
from shardplug.params import ParameterTier
from shardplug.tiers.protocol import Tier, Traffic

__all__ = ["StreamedOptimizer"]

_LOG = logging.getLogger("shardplug.optim")

_LOST = (
    "The weights are those from before the step on every rank, but the optimizer's state is half "
    "changed: load the last checkpoint, here or in a new run."
)


@dataclass(slots=True)
class _Fetched:
    """State of one block, in the tier's memory."""

    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    """Bytes of each region that was fetched."""

    on_device: dict[str, torch.Tensor] = field(default_factory=dict)
    """The same where the parameters are."""

    weights: dict[Piece, torch.Tensor] = field(default_factory=dict)
    """Weights of the pieces whose parameter rests in a tier, each with its gradient."""


@dataclass(slots=True)
class _Changed:
    """What the update of one block made of its state."""

    in_place: set[str] = field(default_factory=set)
    """Keys whose values were changed where they were."""

    new: dict[str, dict[Piece, torch.Tensor]] = field(default_factory=dict)
    """Key -> piece -> a value that is elsewhere."""


class StreamedOptimizer:
    """Takes over the `step` and the `state` of an optimizer. In place.

    A step has three phases for each block, and neighbouring blocks' phases overlap where the tier
    has threads of its own:

    1. fetch: the block's state comes out of the tier; the next blocks' is being read.
    2. update: the optimizer's own class steps the block's parameters.
    3. write back: the block's state goes into the tier, while the next block is updated.

    Blocks without a gradient are neither read nor written.

    State is made by the class itself, in the block's first step, so it is never whole in memory.
    The options in `param_groups` are read anew in each step.

    On a tier that can fail, a step is all or nothing for the weights: see `Journal`. The state
    cannot be taken back likewise. A step that failed once it had begun leaves the optimizer
    without a state to be trusted: it refuses to step and to be saved until state is loaded.

    Args:
        optimizer: The user's optimizer, bound to the sharded parameters.
        tier: Where its state is to live. Room for all of it is reserved now.
        group: All ranks, with messages on the CPU.
        parameters: Where parameters rest, where that is a tier too.

    Raises:
        OptimizerError: When its class cannot be run block by block.
        StorageError: On every rank, when there is too little room on one. Collective for that.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tier: Tier,
        group: dist.ProcessGroup,
        parameters: ParameterTier | None = None,
    ) -> None:
        self.tier = tier
        self._parameters = parameters
        self._weights = None if parameters is None else StoredWeights(parameters)
        self._tiers: list[Tier] = [tier]
        if parameters is not None and not tier.uses(parameters.tier):
            self._tiers.append(parameters.tier)
        self.last_step = Traffic()
        """What the latest step moved."""
        self._group = group
        self._runner = Runner(optimizer)
        self._store = Store(tier, self._runner, optimizer)
        self._can_fail = any(tier.can_fail for tier in self._tiers)
        self._journal = Journal() if self._can_fail else None
        self._entered = False
        self._logged = False
        if step_is_replaced(optimizer):
            raise OptimizerError(
                f"Expected {type(optimizer).__name__} to step by its class's method, but `step` "
                "was replaced on the object. Call prepare_optimizer() before wrapping it."
            )
        error = _outcome(lambda: self._store.reserve(_trained(optimizer)))
        raise_together(error, StorageError, "Making room for optimizer state", group)
        self._view = StreamedState(self._store)
        self._adopt(optimizer)
        optimizer.register_load_state_dict_post_hook(self._adopt)
        optimizer.register_state_dict_post_hook(_with_plain_state)
        replace_step(optimizer, self._step, self._entering)

    # ---------------------------------------------------------------- in the optimizer's place

    @contextmanager
    def _entering(self) -> Iterator[None]:
        self._entered = True
        try:
            yield
        finally:
            self._entered = False

    def require_entered(self) -> None:
        """Refuse a step by the class's own method, which knows nothing of the state's tier.

        Raises:
            OptimizerError: When `step` was looked up before the optimizer was prepared.
        """
        if not self._entered:
            raise OptimizerError(
                "Expected a call of optimizer.step as it is since prepare_optimizer(), got one of "
                "the method that it had before, which cannot reach the optimizer's state. Look "
                "`step` up again, or prepare the optimizer before whatever keeps it."
            )

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Move state that is in the optimizer itself into the tier, parameter by parameter."""
        state: Any = vars(optimizer)["state"]
        if state is self._view:
            return
        self._store.clear()
        try:
            while state:
                parameter = next(iter(state))
                self._view[parameter] = state.pop(parameter)
        except Exception as error:
            self._store.distrust(str(error))
            raise
        finally:
            optimizer.state = self._view  # type: ignore[assignment]

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._logged:
            self._logged = True
            _LOG.info(
                "%s with its state in tier %s: %d threads of this rank update what is on the CPU",
                type(optimizer).__name__,
                self.tier.name,
                torch.get_num_threads(),
            )
        before = [tier.traffic.copy() for tier in self._tiers]
        blocks: list[Block] = []

        def prepare() -> None:
            self._adopt(optimizer)
            self._store.require_sound()
            if self._parameters is not None:
                self._parameters.before_step()
            for tier in self._tiers:
                tier.check()
            self._store.reserve(_trained(optimizer))
            blocks.extend(self._store.blocks_of(_with_gradient(optimizer)))

        self._agree(_outcome(prepare))  # nothing is changed yet
        try:
            error = _outcome(lambda: self._stream(optimizer, blocks))
            self._agree(StorageError(f"{error} {_LOST}") if _is_fault(error) else error)
        except BaseException as failure:  # an interrupt too must not leave half a step
            self._take_back(failure)
            raise
        self._store.commit()
        if self._journal is not None:
            self._journal.commit()
        if self._weights is not None:
            self._weights.commit()
        self.last_step = Traffic()
        for tier, earlier in zip(self._tiers, before, strict=True):
            self.last_step = self.last_step.plus(tier.traffic.since(earlier))

    def _agree(self, error: Exception | None) -> None:
        if self._can_fail:
            raise_together(error, StorageError, "The optimizer step", self._group)
        elif error is not None:
            raise error

    def _stream(self, optimizer: torch.optim.Optimizer, blocks: Sequence[Block]) -> None:
        groups = _group_numbers(optimizer)
        ahead = 0
        for index, block in enumerate(blocks):
            ahead = max(ahead, index)
            while ahead < len(blocks) and self._read_ahead(blocks[ahead]):
                ahead += 1
            fetched = self._fetch(block)
            changed = self._update(optimizer, groups, block, fetched)
            self._write_back(block, fetched, changed)
        for tier in self._tiers:
            tier.flush()

    def _read_ahead(self, block: Block) -> bool:
        """Begin to read a block's regions; False when no buffer is free for one."""
        begun = all(
            self.tier.read_ahead(region)
            for key, region in block.regions.items()
            if block.holds(key)
        )
        if self._weights is None or self._parameters is None or not begun:
            return begun
        return all(map(self._parameters.tier.read_ahead, self._weights.regions(block)))

    def _fetch(self, block: Block) -> _Fetched:
        """Phase 1: bring the block's state into the tier's memory."""
        fetched = _Fetched()
        device = local_tensor(block.pieces[0].entry.parameter).device
        for key, region in block.regions.items():
            if block.holds(key):
                fetched.memory[key] = self.tier.get(region)
                fetched.on_device[key] = fetched.memory[key].to(device)
        if self._weights is not None:
            fetched.weights = self._weights.fetch(block)
        return fetched

    def _update(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Mapping[torch.Tensor, int],
        block: Block,
        fetched: _Fetched,
    ) -> _Changed:
        """Phase 2: step the block's parameters in one call, and return its new state."""
        stepped = self._parts(block, fetched)
        states = _states(block, fetched, stepped)
        options: dict[int, list[torch.Tensor]] = {}
        for piece, part in stepped.items():
            options.setdefault(groups[piece.entry.parameter], []).append(part)
        made = self._runner.run(
            optimizer,
            [{**optimizer.param_groups[n], "params": parts} for n, parts in options.items()],
            states,
        )
        changed = _Changed()
        for piece, part in stepped.items():
            before, state = states.get(part, {}), made.get(part, {})
            numbers: dict[str, Any] = {}
            if (
                before
                and len(before) == len(state)
                and all(map(is_, before.values(), state.values()))
            ):
                changed.in_place.update(before.keys() & piece.entry.keys)
                if len(piece.entry.pieces) == 1:
                    continue  # its numbers have changed in place too
            else:
                self._runner.streamed(state, part)  # refuses what could not be kept
            for key, value in state.items():
                if value is before.get(key) and key in piece.entry.keys:
                    # These classes change all that they keep for an element. Torch's count of a
                    # tensor's changes would not tell: fused kernels leave it as it is.
                    changed.in_place.add(key)
                elif is_like(value, part):
                    changed.new.setdefault(key, {})[piece] = value
                else:
                    numbers[key] = value
            self._store.note(piece.entry, numbers)
        return changed

    def _parts(self, block: Block, fetched: _Fetched) -> dict[Piece, torch.Tensor]:
        """Return the weights of the block's pieces that have a gradient, each with that gradient.

        Where they are changed in place they are saved first.
        """
        parts = dict(fetched.weights)
        own: list[tuple[Piece, torch.Tensor]] = []
        for piece in block.pieces:
            parameter = piece.entry.parameter
            gradient = parameter.grad
            if gradient is None or piece in parts:
                continue
            if not local_tensor(gradient).is_contiguous():
                parameter.grad = gradient = gradient.contiguous()
            part = parts[piece] = piece.of(parameter)
            part.grad = piece.of(gradient)
            own.append((piece, part))
        if self._journal is not None:
            self._journal.save(own)
        return parts

    def _write_back(self, block: Block, fetched: _Fetched, changed: _Changed) -> None:
        """Phase 3: put the block's state back."""
        for key in changed.in_place:
            if fetched.on_device[key] is not fetched.memory[key]:
                fetched.memory[key].copy_(fetched.on_device[key])
        for key, values in changed.new.items():
            for piece, value in values.items():
                piece.entry.keys.setdefault(key, value.dtype)
        if changed.new:
            self._store.make_regions(block)
        for key in dict.fromkeys((*fetched.memory, *changed.new)):
            region = block.regions[key]
            values = changed.new.get(key, {})
            memory = fetched.memory.get(key)
            if memory is None:
                memory = self.tier.get(region, fresh=True)
            if values:
                views = zip(block.pieces, block.views(key, memory), strict=True)
                for piece, view in views:
                    if piece in values:
                        view.copy_(values[piece])
            self.tier.put_back(region, changed=bool(values) or key in changed.in_place)
        if self._weights is not None:
            for piece, weights in fetched.weights.items():
                self._weights.write(piece, weights)

    def _take_back(self, failure: BaseException) -> None:
        """Undo what a failed step did to the weights; the state may be half written."""
        for tier in self._tiers:
            tier.drop()
        self._store.discard()
        if self._weights is not None:
            self._weights.take_back()
        if self._journal is not None:
            self._journal.undo()
            self._store.distrust(str(failure) or type(failure).__name__)

    # ---------------------------------------------------------------- accounts

    @property
    def device_tensors(self) -> list[torch.Tensor]:
        """What of the state is not in the tier: one number per parameter."""
        return [
            value
            for entry in self._store.entries.values()
            for value in entry.scalars.values()
            if isinstance(value, torch.Tensor)
        ]

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes that hold state, by the name of the tier that they are in."""
        held: dict[str, int] = {}
        for block in self._store.blocks:
            for key, region in block.regions.items():
                if block.holds(key):
                    name = self.tier.tier_of(region)
                    held[name] = held.get(name, 0) + region.num_bytes
        return held

    @property
    def work_bytes(self) -> int:
        """Memory on the device that steps need besides the tier's."""
        journal = 0 if self._journal is None else self._journal.scratch_bytes
        return journal + (0 if self._weights is None else self._weights.scratch_bytes)

    def gradients_cleared(self, *, to_none: bool) -> None:
        """Note that gradients were cleared, those that the latest step used up among them.

        Args:
            to_none: False gives the parameters that have none a gradient of zeros.
        """
        if self._journal is not None:
            self._journal.gradients_cleared(to_none=to_none)
        if self._weights is not None:
            self._weights.gradients_cleared(to_none=to_none)


def _outcome(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _is_fault(error: Exception | None) -> bool:
    return isinstance(error, StorageError)


def _trained(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Parameters that may get state, with their groups."""
    return [
        (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad or parameter.grad is not None
    ]


def _with_gradient(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _group_numbers(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    return {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def _with_plain_state(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Make what `optimizer.state_dict()` returns what torch's loading takes: real dictionaries."""
    state = {
        key: values.copied() if isinstance(values, ParameterState) else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _states(
    block: Block, fetched: _Fetched, stepped: Mapping[Piece, torch.Tensor]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the state of the pieces that have one, by their weights.

    The single numbers of a parameter in several pieces are copies: each starts from those before
    the step.
    """
    views = {key: block.views(key, memory) for key, memory in fetched.on_device.items()}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    numbers: list[tuple[dict[str, Any], str]] = []
    for index, piece in enumerate(block.pieces):
        entry = piece.entry
        if not entry.has_state or piece not in stepped:
            continue
        own = {key: parts[index] for key, parts in views.items() if key in entry.keys}
        state = states[stepped[piece]] = {**entry.scalars, **own}
        if len(entry.pieces) == 1:
            continue
        numbers += [
            (state, key)
            for key, value in entry.scalars.items()
            if isinstance(value, torch.Tensor) and key not in own
        ]
    copies = copies_of_all([state[key] for state, key in numbers])
    for (state, key), copy in zip(numbers, copies, strict=True):
        state[key] = copy
    return states
