"""How the modules of a model that was built on meta initialise themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardplug.errors import ModelError

__all__ = ["initialise", "own_tensors"]


def own_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield (module, name, tensor) for parameters and buffers registered on the modules."""
    for module in modules:
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    yield module, name, tensor


def initialise(root: nn.Module, on_meta: dict[nn.Module, list[torch.Tensor]]) -> None:
    """Run each module's own initialisation; the same on every rank, then rank 0's is sent.

    Args:
        root: The whole model.
        on_meta: Modules, with those of their tensors that were on meta.

    Raises:
        ModelError: When a module does not know how to.
    """
    if not on_meta:
        return
    on_meta = {module: list(new) for module, new in on_meta.items()}
    _initialise_adapters(root, on_meta)
    names = {module: name for name, module in root.named_modules()}
    filled_now = {id(tensor) for new in on_meta.values() for tensor in new}
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
        with _shielded(module, filled_now):
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


@contextmanager
def _shielded(module: nn.Module, writable: set[int]) -> Iterator[None]:
    """Put stand-ins where tensors below a module have values.

    Some models initialise layers from the module that holds them, which may have nothing but a
    buffer on meta while its layers are read from files, or sharded, already.
    """
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for inner in module.modules():
        registries: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
        for registry in () if inner is module else registries:
            for name, tensor in registry.items():
                if tensor is not None and id(tensor) not in writable:
                    swapped.append((registry, name, tensor))
    try:
        for registry, name, tensor in swapped:
            stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            registry[name] = (
                nn.Parameter(stand_in, False) if isinstance(tensor, nn.Parameter) else stand_in
            )
        yield
    finally:
        for registry, name, tensor in swapped:
            registry[name] = tensor


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


# -- LoRA -----------------------------------------------------------------------------------------


def _initialise_adapters(root: nn.Module, on_meta: dict[nn.Module, list[torch.Tensor]]) -> None:
    """Let PEFT's layers initialise their adapters, and take these out of `on_meta`.

    PEFT moves a new adapter to where the layer is, so next to weights on meta it loses the values
    that make it start as no change at all: one factor is zero.
    """
    configs: dict[str, Any] = {}
    for module in root.modules():
        found = getattr(module, "peft_config", None)
        if isinstance(found, Mapping):
            configs.update(found)
    for name, layer in root.named_modules():
        reset = getattr(layer, "reset_lora_parameters", None)
        if not callable(reset):
            continue
        for adapter, holders in _adapters(layer).items():
            new = [t for holder, key in holders for t in _taken(on_meta, holder, key)]
            kind = getattr(configs.get(adapter), "init_lora_weights", True)
            if not new or kind is False:  # as torch initialises the factors
                continue
            if kind is not True and kind != "gaussian":
                raise ModelError(
                    f"Expected init_lora_weights to be True, False or 'gaussian' on a model whose "
                    f"weights are still to be read, got {kind!r} for {name}, which needs them. "
                    "Load the model whole first: shardplug.hf.load_pretrained(model)."
                )
            if not _initialises([functools.partial(reset, adapter, kind)], new):
                raise ModelError(
                    f"Expected {name}.reset_lora_parameters({adapter!r}, {kind!r}) to set all of "
                    "the adapter, but it left some on meta. Load the model whole first: "
                    "shardplug.hf.load_pretrained(model)."
                )
            for holder, key in holders:
                _drop(on_meta, holder, key)


def _adapters(layer: nn.Module) -> dict[str, list[tuple[nn.Module, str | None]]]:
    """Map each adapter of a LoRA layer to its modules, or the dictionary that holds its tensor."""
    found: dict[str, list[tuple[nn.Module, str | None]]] = {}
    for kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        held = getattr(layer, kind, None)
        if isinstance(held, nn.ModuleDict):
            for adapter, module in held.items():
                found.setdefault(adapter, []).append((module, None))
        elif isinstance(held, nn.ParameterDict):
            for adapter in held:
                found.setdefault(adapter, []).append((held, adapter))
    return found


def _taken(
    on_meta: dict[nn.Module, list[torch.Tensor]], holder: nn.Module, key: str | None
) -> list[torch.Tensor]:
    tensors = on_meta.get(holder, [])
    return tensors if key is None else [t for t in tensors if t is holder._parameters.get(key)]


def _drop(on_meta: dict[nn.Module, list[torch.Tensor]], holder: nn.Module, key: str | None) -> None:
    gone = {id(tensor) for tensor in _taken(on_meta, holder, key)}
    left = [tensor for tensor in on_meta.get(holder, []) if id(tensor) not in gone]
    if left:
        on_meta[holder] = left
    else:
        on_meta.pop(holder, None)
