"""Forced out-of-memory errors: the report names what was held, where, and what to change."""

from __future__ import annotations

import contextlib
import errno
import io
from pathlib import Path

import pytest
import torch

from shardplug import StorageError, ZeroConfig, ZeroEngine, default_listeners
from shardplug.memory import explained_oom, is_out_of_memory, plan
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool


def _loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return lm_loss(model(batch), batch)


def _fail(folder: Path, where: str, planned: bool) -> tuple[str, str]:
    """Run out of memory in the second step; return the error's traceback text and stderr."""
    engine = ZeroEngine(ZeroConfig(stage=1), listeners=default_listeners())
    model = TinyLM(width=72, hidden=288)
    found = None
    if planned:
        found = plan(
            model,
            devices=2,
            device_memory_gib=4,
            precision="32-true",
            device="cpu",
            loop="pytorch",
            batch=tokens(0, 0, 0),
            loss=_loss,
            accumulate=2,
        )
    running = next((c for c in found.choices if c.name == "zero1"), None) if found else None
    model = engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    steps = {"now": 0}

    def too_much(*_: object) -> None:
        if steps["now"] == 1:
            torch.empty(2**60, dtype=torch.uint8)

    if where == "forward":  # hooks run in the frames of what they hook
        model.blocks[1].up.register_forward_pre_hook(too_much)
    elif where == "backward":
        model.blocks[1].up.register_full_backward_pre_hook(too_much)
    else:
        optimizer.register_step_pre_hook(too_much)
    written = io.StringIO()
    with contextlib.redirect_stderr(written), pytest.raises(RuntimeError) as caught:
        with explained_oom(engine, folder, plan=found, running=running):
            for step in range(2):
                steps["now"] = step
                for micro in range(2):
                    with engine.micro_step(last=micro == 1):
                        _loss(model, tokens(step, micro, engine.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert is_out_of_memory(caught.value)
    return str(caught.value), written.getvalue()


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_the_report_is_printed_once_and_written(pool: RankPool, tmp_path: Path, where: str) -> None:
    results = pool.run(_fail, 2, tmp_path, where, True)
    assert all("allocate" in error for error, _ in results)  # the original error goes on
    printed = [text for _, text in results if text]
    assert len(printed) == 1
    report = (tmp_path / "out_of_memory.txt").read_text()
    assert printed[0].strip() in report and "Traceback" in report
    phase = {
        "forward": "the forward in blocks.1.up",
        "backward": "the backward",
        "step": "the optimizer's step",
    }[where]
    assert f"ran out of memory during {phase}." in report
    assert "optimizer_state" in report and "the largest kind is" in report
    assert "1. " in report and "Trainer(strategy=" in report and "shardplug:zero" in report
    assert ("whole units: none" in report) == (where == "step")


def test_without_a_plan_the_run_itself_is_planned(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_fail, 2, tmp_path, "step", False)
    report = (tmp_path / "out_of_memory.txt").read_text()
    assert "planned at the peak" in report and "shardplug:zero1" in report
    assert "accumulate_grad_batches=2" in report and "accumulate_grad_batches=4" in report


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (StorageError("Expected room for 9 bytes of optimizer state in CPU memory, but"), True),
        (StorageError("Expected 9 bytes of pinned memory for a staging buffer, beside"), True),
        (StorageError("Expected room for 9 bytes in swap files in /d, which has 1"), False),
        (StorageError("Writing 9 bytes at byte 0 of f failed: No space left on device."), False),
    ],
)
def test_which_errors_count(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
