"""Closing an engine: the process is as it was before."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine, default_listeners
from shardplug.watchdog import current
from tests.dist.test_heartbeat import meet
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool

LIBRARIES = ("torch", "lightning", "accelerate", "transformers")


def _modules() -> set[str]:
    return {
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in LIBRARIES and isinstance(module, ModuleType)
    }


def _names(modules: set[str]) -> dict[str, int]:
    """The identity of each function, class and method of some modules."""
    found: dict[str, int] = {}
    for name in modules:
        module = sys.modules[name]
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for method, inner in list(vars(value).items()):
                    if callable(inner) or isinstance(inner, (property, classmethod, staticmethod)):
                        found[f"{name}.{key}.{method}"] = id(inner)
    return found


def _process() -> dict[str, Any]:
    logger = logging.getLogger("shardplug")
    return {
        "excepthook": sys.excepthook,
        "threads": {t.name for t in threading.enumerate() if t.name.startswith("shardplug")},
        "handlers": list(logger.handlers),
        "level": logger.level,
        "watcher": current._watcher,
    }


def _train(engine: ZeroEngine) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = engine.shard(TinyLM())
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    with engine.micro_step():
        batch = tokens(0, 0, engine.rank)
        lm_loss(model(batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _closed_engines_leave_nothing(folder: str, tier: str) -> None:
    import accelerate  # noqa: F401
    import lightning  # noqa: F401
    import transformers  # noqa: F401

    meet()
    # What libraries do in their first use is not the engine's.
    _train(ZeroEngine(ZeroConfig(stage=3)))[0]
    gc.collect()
    modules = _modules()
    names, process, exits = _names(modules), _process(), atexit._ncallbacks()  # type: ignore[attr-defined]
    assert len(names) > 10_000 and any(name.startswith("transformers.") for name in names)
    tiers = {} if tier == "none" else {"offload_optimizer": tier}
    config = ZeroConfig(stage=3, nvme_path=folder if tier == "nvme" else None, **tiers)  # type: ignore[arg-type]
    engines = [ZeroEngine(config, listeners=default_listeners()) for _ in range(2)]
    held = [_train(engine) for engine in engines]
    changed = {name for name, one in _names(modules).items() if names.get(name) != one}
    assert "torch.distributed.tensor.DTensor.item" in changed  # the comparison sees patches
    assert _process() != process and "shardplug-beat" in _process()["threads"]
    engines[0].close()
    weight = next(p for p in held[1][0].parameters() if isinstance(p, DTensor))
    with pytest.raises(RuntimeError, match="each rank would draw the same"):
        torch.randn_like(weight)  # the other engine is open
    engines[1].close()
    engines[1].close()  # harmless
    assert _names(modules) == names
    assert _process() == process
    assert atexit._ncallbacks() <= exits + 1  # type: ignore[attr-defined]  # a save's report
    for _, optimizer in held:
        assert not {"step", "zero_grad"} & set(vars(optimizer))
    assert not list(Path(folder).rglob("*.swap")) and not list(Path(folder).rglob("shardplug-*"))
    dist.barrier()


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_closed_engines_leave_nothing(pool: RankPool, tmp_path: Path, tier: str) -> None:
    pool.close()  # engines of other tests may not be collected yet
    pool.run(_closed_engines_leave_nothing, 2, str(tmp_path), tier)
    pool.close()  # its ranks have met in another store
