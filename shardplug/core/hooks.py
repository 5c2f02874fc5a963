"""Hooks on modules that may be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["outside_of_graphs"]


def outside_of_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a hook out of the graphs of a compiled module.

    Dynamo traces the hooks of a module that it compiles. Ours look at bookkeeping of torch and
    of the engine, which changes while it is traced and which no graph should depend on.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled
