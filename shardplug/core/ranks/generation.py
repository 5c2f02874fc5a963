"""Keeps ranks that generate texts of different lengths from waiting for each other for ever."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["generate_in_step"]


def generate_in_step(root: nn.Module, is_held: Callable[[nn.Module], bool]) -> None:
    """Give every `generate` in the model its default for `synced_gpus`.

    Each token is a forward, and each forward of a sharded model a collective. Hugging Face's
    `synced_gpus` lets ranks that are through go on with forwards that count for nothing. It asks
    for them where the module itself has FSDP2's mark, and knows nothing of a model held whole.

    Args:
        root: The sharded model.
        is_held: Whether a module's parameters are held whole, so that its forwards exchange
            nothing; then ranks generate on their own, and may have nothing to generate at all.
    """
    for module in root.modules():
        method = getattr(type(module), "generate", None)
        if not callable(method):
            continue
        signature = inspect.signature(method)
        if "synced_gpus" in signature.parameters:
            own: Any = module
            call = functools.wraps(method)(
                functools.partial(_generate, own.generate, signature, is_held)
            )
            own.generate = types.MethodType(call, module)  # frameworks look for a method


def _generate(
    generate: Callable[..., Any],
    signature: inspect.Signature,
    is_held: Callable[[nn.Module], bool],
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = signature.bind_partial(module, *args, **kwargs)
    if given.arguments.get("synced_gpus") is None:
        given.arguments["synced_gpus"] = not is_held(module)
    return generate(*given.args[1:], **given.kwargs)
