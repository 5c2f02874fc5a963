"""Whole weights of a sharded module, and the `save_pretrained` of Hugging Face that writes them."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.collective import gather, rank_and_size, together
from shardplug.core._torch.resharding import reshard_all
from shardplug.core._torch.tensors import local_tensor, share_memory

__all__ = ["save_pretrained_whole", "whole_state"]

_WRITERS = ("save_pretrained", "push_to_hub")


def whole_state(module: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return whole parameters and persistent buffers on the CPU, tied ones once. Collective.

    Args:
        module: A sharded model at rest, or a module in one.
        keep: False gives an empty dictionary.
    """
    owner = {
        name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    seen: dict[int, str] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue
        first = seen.setdefault(owner[name], name) if name in owner else name
        if first != name:  # tied tensors stay one tensor
            if keep:
                whole[name] = whole[first]
            continue
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            # At world size 1 the whole is the shard itself, which the next step changes.
            shared = share_memory(full, local_tensor(value))
            whole[name] = full.detach().to("cpu", copy=shared)
    return whole


def save_pretrained_whole(root: nn.Module) -> None:
    """Let `save_pretrained` and `push_to_hub` of the Hugging Face models in `root` write it all.

    Called without a state dict they become collective: every rank calls them, rank 0 writes.

    Args:
        root: The sharded model.
    """
    for module in root.modules():
        for name in _WRITERS if hasattr(type(module), "save_pretrained") else ():
            method = getattr(type(module), name, None)
            if callable(method):
                call = functools.wraps(method)(functools.partial(_write_whole, root, method))
                vars(module)[name] = types.MethodType(call, module)


def _write_whole(
    root: nn.Module, method: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    given = inspect.signature(method).bind_partial(module, *args, **kwargs).arguments
    named = {**given, **given.get("kwargs", {})}
    if named.get("state_dict") is not None or named.get("distributed_checkpoint"):
        return method(module, *args, **kwargs)
    root.state_dict()  # refuses while parameters are held whole
    call = f"{method.__name__}()"
    gather(None, call)  # a rank that calls alone learns it here
    reshard_all(root)
    first = rank_and_size()[0] == 0
    state = whole_state(module, keep=first)

    def write() -> Any:
        if not first:
            return None
        with _giving(module, state):
            return method(module, *args, **kwargs)

    return together(write, call)


@contextmanager
def _giving(module: nn.Module, state: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let a module's `state_dict()` be `state`, and its own methods write."""
    own: dict[str, Any] = vars(module)
    replaced = {name: own.pop(name) for name in (*_WRITERS, "state_dict") if name in own}
    own["state_dict"] = lambda *_, **__: dict(state)
    try:
        yield
    finally:
        del own["state_dict"]
        own.update(replaced)
