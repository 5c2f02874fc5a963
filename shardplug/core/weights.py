"""Every rank starts from rank 0's weights and buffers; models built on meta are filled."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from shardplug.errors import ModelError

__all__ = ["Filler", "check_same_model", "own_tensors"]


def own_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield (module, name, tensor) for parameters and buffers registered on the modules."""
    for module in modules:
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    yield module, name, tensor


def check_same_model(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Refuse models whose structure differs between ranks.

    Raises:
        ModelError: On every rank, naming the first parameter or buffer that differs.
    """
    rows = [
        f"{name}: shape {tuple(tensor.shape)}, {tensor.dtype}"
        + (", trainable" if tensor.requires_grad else "")
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


class Filler:
    """Moves tensors to a device and makes them equal to rank 0's, module by module.

    Tensors on meta are allocated and initialised the way the model initialises itself
    (`_init_weights` of Hugging Face models, `reset_parameters` of torch modules), then rank 0's
    values are sent. Tensors shared by several modules stay shared.

    Args:
        root: The whole model, searched for the Hugging Face model that owns a module.
        device: Where the tensors go.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._root = root
        self._device = device
        self._made: dict[torch.Tensor, torch.Tensor] = {}

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
        new_tensors: list[torch.Tensor] = []
        on_meta: dict[nn.Module, list[torch.Tensor]] = {}
        for module, name, tensor in list(own_tensors(modules)):
            made = self._made.get(tensor)
            if made is None:
                made = self._made[tensor] = _on_device(tensor, self._device)
                new_tensors.append(made)
                if tensor.is_meta:
                    on_meta.setdefault(module, []).append(made)
            if made is not tensor:
                registry = module._parameters if name in module._parameters else module._buffers
                registry[name] = made  # type: ignore[assignment]
        _initialise(self._root, on_meta)
        for tensor in new_tensors:
            # As bytes: not every backend sends bool, complex or integer tensors.
            dist.broadcast(tensor.detach().reshape(-1).view(torch.uint8), src=0)


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


def _initialise(root: nn.Module, on_meta: dict[nn.Module, list[torch.Tensor]]) -> None:
    """Run each module's own initialisation; the same on every rank, then rank 0's is sent.

    Args:
        root: The whole model.
        on_meta: Modules, with those of their tensors that were on meta.
    """
    if not on_meta:
        return
    names = {module: name for name, module in root.named_modules()}
    owners = [m for m in root.modules() if hasattr(m, "_init_weights") and hasattr(m, "config")]
    for module, new in on_meta.items():
        owner = next((o for o in reversed(owners) if module in set(o.modules())), None)
        filled = {id(tensor) for tensor in new}
        real = [t for _, _, t in own_tensors([module]) if id(t) not in filled and not t.is_meta]
        values = [tensor.detach().clone() for tensor in real]
        steps: list[Callable[[], object]] = []
        if owner is not None:
            steps.append(functools.partial(getattr(owner, "_init_weights"), module))  # noqa: B009
        if callable(reset := getattr(module, "reset_parameters", None)):
            steps.append(reset)
        tries = range(1, len(steps) + 1)
        done = any(_initialises(steps[:count], new) for count in tries)
        with torch.no_grad():
            for tensor, value in zip(real, values, strict=True):
                tensor.copy_(value)
        if not done:
            raise ModelError(
                f"{names[module] or 'The model'} ({type(module).__name__}) was built on meta and "
                "has no way to initialise its own parameters and buffers. Give it a "
                "reset_parameters() method that sets all of them, or build it on the CPU."
            )


def _initialises(steps: list[Callable[[], object]], tensors: list[torch.Tensor]) -> bool:
    """Run an initialisation, and say whether it set every one of the tensors."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(_mark(tensor))
        for step in steps:
            step()
        untouched = [t for t in tensors if bool((t != t).any()) or _is_marked(t)]
        flags = [t for t in untouched if t.dtype == torch.bool]
        if not flags or len(flags) < len(untouched):
            return not untouched
        for flag in flags:  # False may be what they were set to: try again from True
            flag.fill_(True)
        for step in steps:
            step()
        return not any(bool(flag.all()) for flag in flags)


def _mark(tensor: torch.Tensor) -> float | int:
    """A value that no initialisation sets: what keeps it was left out."""
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return 0 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max - 17


def _is_marked(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and bool((tensor == _mark(tensor)).all())
