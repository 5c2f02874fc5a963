"""Which parameter's optimizer state is where in a tier."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardplug.core._torch.tensors import local_tensor
from shardplug.errors import OptimizerError, StorageError
from shardplug.optim.blocks import Block, Entry, lay_out
from shardplug.optim.classes import Runner
from shardplug.optim.values import stored_value, value_tensor
from shardplug.tiers.protocol import Region, Tier

__all__ = ["Store"]


class Store:
    """Entries and blocks of one optimizer, and reading and writing single values.

    Args:
        tier: Where the regions are.
        runner: Knows what state the optimizer makes.
        optimizer: The user's optimizer.
    """

    def __init__(self, tier: Tier, runner: Runner, optimizer: torch.optim.Optimizer) -> None:
        self.entries: dict[torch.Tensor, Entry] = {}
        self.blocks: list[Block] = []
        self._tier = tier
        self._runner = runner
        self._optimizer = weakref.ref(optimizer)
        self._distrusted: str | None = None
        self._regions: list[Region] = []
        weakref.finalize(self, tier.free, self._regions).atexit = False
        self._noted: dict[Entry, Mapping[str, Any]] = {}

    # ---------------------------------------------------------------- room

    def reserve(self, parameters: Iterable[tuple[torch.Tensor, Mapping[str, Any]]]) -> None:
        """Make entries for new parameters, and room for the state they will have.

        Raises:
            OptimizerError: When the optimizer makes state that cannot be kept.
            StorageError: When there is too little room; nothing is kept of the new entries then.
        """
        new = [(p, group) for p, group in parameters if p not in self.entries]
        if not new:
            return
        layouts: dict[tuple[Any, ...], dict[str, torch.dtype]] = {}
        made: dict[torch.Tensor, Entry] = {}
        for parameter, group in new:
            kind = (id(group), parameter.dtype, parameter.device, parameter.ndim == 0)
            if kind not in layouts:
                layouts[kind] = self._layout(parameter, group)
            made[parameter] = Entry(parameter, dict(layouts[kind]))
        blocks = lay_out(made.values(), self._tier.block_bytes)
        wanted = [(block, key) for block in blocks for key in block.keys_without_region()]
        self._add_regions(wanted)
        self.entries.update(made)
        self.blocks += blocks

    def _layout(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.dtype]:
        optimizer = self._optimizer()
        assert optimizer is not None
        if parameter.ndim == 0:
            return {}  # all its state is single numbers, which stay in memory
        state = vars(optimizer)["state"]
        present = state.get(parameter) if isinstance(state, dict) else None
        if present:
            local = {key: _local(value) for key, value in present.items()}
            return self._runner.streamed(local, local_tensor(parameter))
        return self._runner.layout(optimizer, group, parameter.dtype, parameter.device)

    def make_regions(self, block: Block) -> None:
        """Make room for keys that a block's state has got since it was laid out.

        Raises:
            StorageError: When there is too little.
        """
        self._add_regions([(block, key) for key in block.keys_without_region()])

    def _add_regions(self, wanted: Sequence[tuple[Block, str]]) -> None:
        if not wanted:
            return
        regions = self._tier.allocate([block.region_bytes(key) for block, key in wanted])
        self._regions += regions
        for (block, key), region in zip(wanted, regions, strict=True):
            block.add_region(key, region)

    def blocks_of(self, parameters: Iterable[torch.Tensor]) -> list[Block]:
        """Return the blocks that hold these parameters, in order."""
        chosen = {piece.block for p in parameters for piece in self.entries[p].pieces}
        return [block for block in self.blocks if block in chosen]

    # ---------------------------------------------------------------- steps

    def note(self, entry: Entry, numbers: Mapping[str, Any]) -> None:
        """Keep the numbers that a step gave a parameter until the step is known to be good.

        Of a parameter in several pieces the first one's count: all are equal.
        """
        self._noted.setdefault(entry, numbers)

    def commit(self) -> None:
        """Make what a step has noted the current state."""
        for entry, numbers in self._noted.items():
            entry.scalars.update(numbers)
            entry.has_state = bool(entry.scalars or entry.keys)
        self._noted.clear()

    def discard(self) -> None:
        """Forget what a failed step has noted."""
        self._noted.clear()

    # ---------------------------------------------------------------- trust

    def distrust(self, why: str) -> None:
        """Refuse the state from now on, until it is replaced as a whole."""
        self._distrusted = why

    def require_sound(self) -> None:
        """Refuse to go on with a state that a failed step has left half written.

        Raises:
            StorageError: Saying why.
        """
        if self._distrusted is not None:
            raise StorageError(
                "Expected whole optimizer state, but an earlier step failed after it had begun to "
                "change it. The weights are those from before that step. Load the last checkpoint, "
                f"here or in a new run. The step failed with: {self._distrusted}"
            )

    def clear(self) -> None:
        """Forget all state, which also ends the distrust."""
        for entry in self.entries.values():
            self.forget(entry)
        self._distrusted = None

    # ---------------------------------------------------------------- single values

    def entry_of(self, parameter: torch.Tensor) -> Entry:
        """Return the parameter's entry; made, with its room, when it is new."""
        self.require_sound()
        return self._entry_of(parameter)

    def _entry_of(self, parameter: torch.Tensor) -> Entry:
        if parameter not in self.entries:
            optimizer = self._optimizer()
            assert optimizer is not None
            for group in optimizer.param_groups:
                if any(parameter is known for known in group["params"]):
                    self.reserve([(parameter, group)])
                    break
            else:
                raise OptimizerError(
                    f"Expected a parameter of {type(optimizer).__name__}, got one of shape "
                    f"{tuple(parameter.shape)} that is in none of its groups."
                )
        return self.entries[parameter]

    def forget(self, entry: Entry) -> None:
        """Drop all state of a parameter."""
        entry.scalars.clear()
        entry.has_state = False

    def tensor(self, entry: Entry, key: str) -> torch.Tensor:
        """Return a value laid out like the parameter; touching it reads or writes the tier."""
        self.require_sound()
        return value_tensor(self, entry, key, entry.keys[key])

    def target(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the tensor to load a value into, or None where it has no place of this dtype."""
        entry = self._entry_of(parameter)
        if entry.keys.get(key) != dtype:
            return None
        return value_tensor(self, entry, key, dtype)

    def read(self, entry: Entry, key: str) -> torch.Tensor:
        """Return a copy of this rank's part of a value, on the CPU."""
        self.require_sound()
        shape = local_tensor(entry.parameter).shape
        whole = torch.empty(shape, dtype=entry.keys[key])
        flat = whole.view(-1)
        regions = [piece.block.regions[key] for piece in entry.pieces]
        ahead = 0
        for index, piece in enumerate(entry.pieces):
            ahead = max(ahead, index)
            while ahead < len(regions) and self._tier.read_ahead(regions[ahead]):
                ahead += 1
            memory = self._tier.get(regions[index])
            flat[piece.low : piece.high].copy_(piece.view(key, memory))
            self._tier.put_back(regions[index], changed=False)
        return whole

    @torch.no_grad()
    def write(self, entry: Entry, key: str, value: Any) -> None:
        """Replace a value, or add it.

        Raises:
            OptimizerError: When it has neither the parameter's shape nor is one number.
            StorageError: When it cannot be written.
        """
        self.require_sound()
        stored = stored_value(value)
        if stored is not None and stored.is_in(self, entry, key):
            entry.has_state = True  # it was loaded to where it belongs
            return
        local = _local(value)
        target = local_tensor(entry.parameter)
        if not isinstance(local, torch.Tensor) or local.ndim == 0:
            entry.scalars[key] = (
                local.detach().clone() if isinstance(local, torch.Tensor) else local
            )
            entry.has_state = True
            return
        if local.shape != target.shape:
            raise OptimizerError(
                f"Expected optimizer state {key} of this rank's shape {tuple(target.shape)}, got "
                f"{tuple(local.shape)} for a parameter of shape {tuple(entry.parameter.shape)}."
            )
        flat = local.detach().reshape(-1)
        self._set_dtype(entry, key, flat.dtype)
        for piece in entry.pieces:
            block = piece.block
            self.make_regions(block)
            region = block.regions[key]
            memory = self._tier.get(region, fresh=not block.holds(key))
            piece.view(key, memory).copy_(flat[piece.low : piece.high])
            self._tier.put_back(region, changed=True)
        self._tier.flush()
        entry.has_state = True

    @torch.no_grad()
    def write_rows(self, entry: Entry, key: str, first: int, values: torch.Tensor) -> None:
        """Replace rows of a value, whether or not the parameter has state yet.

        Raises:
            StorageError: When they cannot be written.
        """
        if not values.numel():
            return
        shape = local_tensor(entry.parameter).shape
        flat = values.detach().reshape(-1)
        begin = first * (shape.numel() // shape[0])
        end = begin + flat.numel()
        for piece in entry.pieces:
            low, high = max(piece.low, begin), min(piece.high, end)
            if low >= high:
                continue
            self.make_regions(piece.block)
            region = piece.block.regions[key]
            memory = self._tier.get(region)  # what is beside it may have been loaded already
            rows = piece.view(key, memory)[low - piece.low : high - piece.low]
            rows.copy_(flat[low - begin : high - begin])
            self._tier.put_back(region, changed=True)
        self._tier.flush()

    def _set_dtype(self, entry: Entry, key: str, dtype: torch.dtype) -> None:
        """Keep a key in the dtype its values come in, where no other value is there yet."""
        for block in dict.fromkeys(piece.block for piece in entry.pieces):
            if block.dtypes.get(key, dtype) == dtype:
                continue
            if block.holds(key):
                raise OptimizerError(
                    f"Expected optimizer state {key} in {block.dtypes[key]}, as for the other "
                    f"parameters, got {dtype}."
                )
            for piece in block.pieces:
                if key in piece.entry.keys:
                    piece.entry.keys[key] = dtype
            del block.regions[key], block.dtypes[key]
        entry.keys[key] = dtype


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, torch.Tensor) else value
