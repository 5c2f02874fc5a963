"""Saving and loading what an engine trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardplug.checkpoint import Reader, state_of_model, state_of_optimizer, write
from shardplug.checkpoint.write.background import Background
from shardplug.collective import together
from shardplug.errors import CheckpointError

if TYPE_CHECKING:
    from shardplug.engine.engine import ZeroEngine

__all__ = ["load", "save"]


def save(
    engine: ZeroEngine,
    path: str | PathLike[str],
    optimizers: Sequence[torch.optim.Optimizer],
    extra: Mapping[str, Any] | None,
    side_files: Callable[[Path], None] | None,
    background: Background | None,
) -> None:
    """Write a folder: see `ZeroEngine.save`.

    Args:
        engine: The engine.
        path: The folder.
        optimizers: Prepared optimizers.
        extra: Anything else.
        side_files: Adds files to the folder.
        background: What writes while training goes on; None waits for it here.
    """

    def collect() -> tuple[list[Any], list[Any], dict[str, Any]]:
        if not isinstance(extra, (Mapping, type(None))):
            raise CheckpointError(f"Expected extra to be a dictionary, got {type(extra).__name__}.")
        return (
            [state_of_model(model) for model in engine.models],
            [state_of_optimizer(engine.models, optimizer) for optimizer in optimizers],
            dict(extra or {}),
        )

    models, states, content = together(collect, "Saving")
    step = content.get("step")
    write(
        path,
        models=models,
        optimizers=states,
        meta={"extra": content},
        run={
            **engine.describe_run(),
            "framework": "pytorch",
            "step": step if isinstance(step, int) else None,
        },
        modules=engine.models,
        side_files=side_files,
        background=background,
    )


def load(
    engine: ZeroEngine,
    path: str | PathLike[str],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    strict: bool,
    rng: bool,
    rename: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Read a folder: see `ZeroEngine.load`."""
    reader = Reader(path, rename=rename)
    step = reader.manifest.get("step")
    other = {} if step is None else {"step": step}
    extra = together(lambda: dict(reader.meta.get("extra", other)), "Loading")
    reader.load(engine, optimizers, strict=strict)
    if rng:
        reader.restore_rng()
    return extra
