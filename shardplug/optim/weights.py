"""Weights that rest in a tier, on their way through an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardplug.core._torch.tensors import laid_out_like, local_tensor
from shardplug.optim.blocks import Block, Piece
from shardplug.params.pieces import elements
from shardplug.params.stored_shard import GradientTensor, ShardHolder, ShardTensor
from shardplug.params.tier import ParameterTier
from shardplug.tiers.protocol import Region

__all__ = ["StoredWeights"]


class StoredWeights:
    """Brings pieces of weights and gradients to a step, and takes the new weights back.

    New weights are written where the gradients were (see `ShardHolder`), so that a step that fails
    leaves the old ones as they are.

    Args:
        parameters: Where they rest.
    """

    def __init__(self, parameters: ParameterTier) -> None:
        self._parameters = parameters
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._stepped: dict[ShardHolder, torch.Tensor] = {}
        self._consumed: list[torch.Tensor] = []

    @property
    def scratch_bytes(self) -> int:
        """Memory that one block's weights and gradients are worked on in."""
        return sum(buffer.nbytes for buffer in self._scratch.values())

    def regions(self, block: Block) -> Iterator[Region]:
        """Yield what has to be read for a block."""
        for piece in block.pieces:
            shard = _shard_of(piece)
            if shard is None or piece.entry.parameter.grad is None or not piece.num_elements:
                continue
            index = shard.piece_at(piece.low, piece.high)
            yield shard.master[index]
            if not shard.gradient.is_zero:
                yield shard.gradient.places[index]

    def fetch(self, block: Block) -> dict[Piece, torch.Tensor]:
        """Return the weights of a block's pieces that rest here, each with its gradient.

        They are overwritten by the next call.

        Raises:
            StorageError: When they cannot be read.
        """
        found: dict[Piece, torch.Tensor] = {}
        used: dict[torch.dtype, int] = {}
        size = sum(piece.num_elements for piece in block.pieces)
        for piece in block.pieces:
            shard = _shard_of(piece)
            if shard is None or piece.entry.parameter.grad is None:
                continue
            begin = used.get(shard.dtype, 0)
            used[shard.dtype] = begin + piece.num_elements
            weights, gradient = (
                self._buffer(kind, shard.dtype, size)[begin : used[shard.dtype]]
                for kind in ("weights", "gradient")
            )
            self._read(shard, piece, weights, gradient)
            weights.grad = gradient
            found[piece] = weights
        return found

    def _buffer(self, kind: str, dtype: torch.dtype, size: int) -> torch.Tensor:
        held = self._scratch.get((kind, dtype))
        if held is None or held.numel() < size:
            held = self._scratch[kind, dtype] = torch.empty(size, dtype=dtype)
        return held

    def _read(
        self, shard: ShardHolder, piece: Piece, weights: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        if not piece.num_elements:
            return
        index = shard.piece_at(piece.low, piece.high)
        self._copy(shard.master[index], weights)
        if shard.gradient.is_zero:
            gradient.zero_()
        else:
            self._copy(shard.gradient.places[index], gradient)
            shard.gradient.scaled(gradient)

    def _copy(self, region: Region, target: torch.Tensor) -> None:
        memory = self._parameters.tier.get(region)
        target.copy_(elements(memory, target.numel(), target.dtype))
        self._parameters.tier.put_back(region, changed=False)

    def write(self, piece: Piece, weights: torch.Tensor) -> None:
        """Begin to write a piece's new weights.

        Raises:
            StorageError: When an earlier write failed.
        """
        shard = _shard_of(piece)
        assert shard is not None
        self._stepped[shard] = piece.entry.parameter
        if piece.num_elements:
            shard.write_new(shard.piece_at(piece.low, piece.high), weights)

    def commit(self) -> None:
        """Make the new weights count. The gradients are used up: `parameter.grad` is None."""
        for shard in self._stepped:
            shard.commit()
        self._consumed = list(self._stepped.values())
        self._forget_gradients()

    def take_back(self) -> None:
        """Keep the weights from before the step. The gradients are lost."""
        for shard in self._stepped:
            shard.take_back()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for parameter in self._stepped.values():
            parameter.grad = None
        self._stepped.clear()

    def gradients_cleared(self, *, to_none: bool) -> None:
        """Note that gradients were cleared since the latest step.

        Args:
            to_none: False gives the parameters whose gradient that step used up one of zeros, as
                they would have had without a tier.
        """
        for parameter in self._consumed:
            shard = local_tensor(parameter)
            if not to_none and parameter.grad is None and isinstance(shard, ShardTensor):
                shard.holder.gradient.zero()
                parameter.grad = laid_out_like(GradientTensor(shard.holder.gradient), parameter)
        self._consumed = []


def _shard_of(piece: Piece) -> ShardHolder | None:
    local = local_tensor(piece.entry.parameter)
    return local.holder if isinstance(local, ShardTensor) else None
