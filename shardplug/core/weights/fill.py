"""Every rank starts from the same weights and buffers; models built on meta are filled."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.core.weights.initial import initialise, own_tensors
from shardplug.core.weights.sources import (
    DeferredWeights,
    StoredTensor,
    forget_waiting,
    read_own_rows,
)
from shardplug.errors import ModelError

__all__ = ["WeightMaterializer", "check_same_model", "own_tensors"]


def check_same_model(
    model: nn.Module, group: dist.ProcessGroup | None = None, waiting: DeferredWeights | None = None
) -> None:
    """Refuse models whose structure differs between ranks.

    Args:
        model: The model, unsharded.
        group: The ranks to compare.
        waiting: What it has left to read.

    Raises:
        ModelError: On every rank, naming the first parameter or buffer that differs.
    """
    rows = [
        f"{name}: shape {tuple(tensor.shape)}, {tensor.dtype}"
        + (", trainable" if tensor.requires_grad else "")
        + (", read from files" if waiting is not None and tensor in waiting.tensors else "")
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    ]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    digests: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    everyone: list[list[str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, rows, group=group)
    first = everyone[0] or []
    for rank, other in enumerate(everyone):
        for index in range(max(len(first), len(other or []))):
            mine = first[index] if index < len(first) else "nothing"
            theirs = (other or [])[index] if index < len(other or []) else "nothing"
            if mine != theirs:
                raise ModelError(
                    "Expected the same model on every rank, but rank 0 has "
                    f"[{mine}] where rank {rank} has [{theirs}]."
                )


class WeightMaterializer:
    """Moves tensors to a device and gives them their values, module by module.

    Tensors with values are made equal to rank 0's. Tensors on meta are allocated and initialised
    the way the model initialises itself (`_init_weights` of Hugging Face models,
    `reset_parameters` of torch modules), then rank 0's values are sent. Those that the model has
    left to read are read, by each rank for itself: parameters that are to be sharded stay on meta
    until they are, so that no rank ever holds more than its rows. Tensors shared by several
    modules stay shared.

    Args:
        root: The whole model, searched for the Hugging Face model that owns a module.
        device: Where the tensors go.
        waiting: What the model has left to read.
        whole: Parameters that are not going to be sharded; None means all.
        alone: Whether other ranks take no part: nothing is sent.
    """

    def __init__(
        self,
        root: nn.Module,
        device: torch.device,
        waiting: DeferredWeights,
        *,
        whole: Iterable[nn.Parameter] | None = None,
        alone: bool = False,
    ) -> None:
        self._root = root
        self._device = device
        self._waiting = waiting
        self._whole = None if whole is None else set(whole)
        self._alone = alone
        self._made: dict[torch.Tensor, torch.Tensor] = {}
        self._filled: list[torch.Tensor] = []
        self._to_shard: list[tuple[nn.Module, str, StoredTensor]] = []
        self._new_names: list[str] = []
        self._failure: Exception | None = None
        self._names: dict[nn.Module, str] = {}
        self._saved_names: set[str] = set()
        if waiting.together is not None:
            self._names = {module: name for name, module in root.named_modules()}
            self._saved_names = set(root.state_dict())
            waiting.together(lambda: [check() for check in waiting.checks], "Loading the weights")

    def current(self, tensor: nn.Parameter) -> nn.Parameter:
        """Return the parameter that now stands where `tensor` stood."""
        made = self._made.get(tensor, tensor)
        assert isinstance(made, nn.Parameter)
        return made

    def fill(self, modules: list[nn.Module]) -> None:
        """Fill the tensors registered on `modules` themselves.

        Raises:
            ModelError: When a module on meta does not know how to initialise itself.
        """
        to_send: list[torch.Tensor] = []
        on_meta: dict[nn.Module, list[torch.Tensor]] = {}
        for module, name, tensor in list(own_tensors(modules)):
            stored = self._waiting.tensors.get(tensor)
            if stored is not None and self._is_sharded_later(tensor):
                self._to_shard.append((module, name, stored))
                continue
            made = self._made.get(tensor)
            if made is None:
                made = self._made[tensor] = _on_device(tensor, self._device)
                self._filled.append(tensor)
                if stored is not None:
                    self._read(made, stored)
                else:
                    to_send.append(made)
                    if tensor.is_meta:
                        on_meta.setdefault(module, []).append(made)
                        self._note_new(module, name)
            if made is not tensor:
                registry = module._parameters if name in module._parameters else module._buffers
                registry[name] = made  # type: ignore[assignment]
        initialise(self._root, on_meta)
        if self._alone:
            return
        for tensor in to_send:
            # As bytes: not every backend sends bool, complex or integer tensors.
            dist.broadcast(tensor.detach().reshape(-1).view(torch.uint8), src=0)

    def release(self, modules: list[nn.Module]) -> None:
        """Forget whole parameters that stood on modules and were sharded, so that they go."""
        there = {id(tensor) for _, _, tensor in own_tensors(modules)}
        for tensor in self._filled:
            if isinstance(self._made[tensor], nn.Parameter) and id(self._made[tensor]) not in there:
                del self._made[tensor]
        self._filled.clear()

    def fill_shards(self) -> None:
        """Read this rank's rows of the parameters that were sharded since the last call."""
        left = []
        for module, name, stored in self._to_shard:
            on_meta = module._parameters[name]
            if not isinstance(on_meta, DTensor):
                left.append((module, name, stored))  # shared with a unit still to be sharded
                continue
            made = self._made.get(on_meta)
            if made is None:
                shard = torch.empty_like(on_meta, device=self._device)
                made = nn.Parameter(shard, requires_grad=on_meta.requires_grad)
                self._made[on_meta] = made
                self._read(made, stored)
            assert isinstance(made, nn.Parameter)
            module._parameters[name] = made
        self._to_shard = left

    def finish(self) -> None:
        """Fail on every rank if one could not read, and say what was not in the files.

        Raises:
            CheckpointError: On every rank.
        """
        if self._waiting.together is None:
            return
        self._waiting.together(self._raise_failure, "Reading the weights")
        assert not self._to_shard
        forget_waiting(self._root)
        first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        kind = type(self._root).__name__
        for names, what in (
            (self._new_names, f"Not in the files of {kind}, so newly initialised"),
            (self._waiting.replaced, f"Not read from the files of {kind}, as they have values"),
        ):
            if names and first:
                warnings.warn(f"{what}: {_some(names)}.{_hint(names)}", UserWarning, stacklevel=5)

    def _is_sharded_later(self, tensor: torch.Tensor) -> bool:
        return (
            self._whole is not None
            and isinstance(tensor, nn.Parameter)
            and tensor not in self._whole
        )

    def _read(self, tensor: torch.Tensor, stored: StoredTensor) -> None:
        if self._failure is not None:  # the others wait for this rank's part in sharding
            return
        try:
            read_own_rows(tensor, stored)
        except Exception as error:  # raised on every rank, at the end
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _note_new(self, module: nn.Module, name: str) -> None:
        prefix = self._names.get(module)
        full = f"{prefix}.{name}" if prefix else name
        if full in self._saved_names:
            self._new_names.append(full)


def _hint(names: list[str]) -> str:
    if not any("lora_" in name for name in names):
        return ""
    return " A trained adapter is read by shardplug.hf.load_pretrained(model, its_folder)."


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (" and more" if len(names) > 6 else "")


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.is_meta:
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(new, requires_grad=tensor.requires_grad)
        return new
    if tensor.device == device and tensor.is_contiguous():
        return tensor
    moved = tensor.detach().to(device).contiguous()
    if isinstance(tensor, nn.Parameter):
        # The same Parameter object: optimizers and ties hold on to it.
        tensor.data = moved
        return tensor
    return moved
