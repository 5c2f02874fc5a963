"""Limits of the host, and what a report does when it fails itself."""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug.engine.listener import Listeners
from shardplug.oom.watch import OomWatch
from shardplug.plan.trace.meta_copy import NoCollectives, meta_copy, shapes_of
from shardplug.process.limits import ControlGroup
from tests.support.models import TinyLM, tokens


def _group(folder: Path, used: int, high: int = 0, kills: int = 0) -> Path:
    (folder / "memory.max").write_text(f"{2**30}\n")
    (folder / "memory.high").write_text("max\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {2**26}\n")
    (folder / "memory.events").write_text(f"low 0\nhigh {high}\nmax 0\noom_kill {kills}\n")
    return folder


def test_a_control_groups_limit_is_seen_to_be_near(tmp_path: Path) -> None:
    group = ControlGroup(_group(tmp_path, 2**29))
    assert group.limit == 2**30 and group.used == 2**29 - 2**26
    assert group.near() == ""
    _group(tmp_path, 2**30)  # of which some are files that the system can drop
    assert group.near() == ""
    _group(tmp_path, 2**30, high=7)  # the system has begun to slow the group down
    assert "of the 1 GiB it may" in group.near()
    _group(tmp_path, 2**30 + 2**26, kills=2)
    assert group.near() and group.kills == 2


def test_version_1_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "memory.usage_in_bytes").write_text("100\n")
    (tmp_path / "memory.limit_in_bytes").write_text("100\n")
    group = ControlGroup(tmp_path)
    assert group.limit == 100 and group.near()
    (tmp_path / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert group.limit is None and group.near() == ""


class _Engine:
    rank, world_size, device = 0, 1, torch.device("cpu")
    models: list[nn.Module] = []
    config: Any = None

    def memory(self) -> dict[str, int]:
        raise ValueError("the accounting are gone")


def test_a_report_that_fails_hides_nothing(tmp_path: Path) -> None:
    engine = _Engine()
    watch = OomWatch(folder=tmp_path)
    watch.opened(engine)  # type: ignore[arg-type]
    written = io.StringIO()
    with (
        redirect_stderr(written),
        pytest.raises(MemoryError) as caught,
        Listeners([watch]).telling_errors(),
    ):
        raise MemoryError("no room")
    assert str(caught.value) == "no room"
    notes = getattr(caught.value, "__notes__", [])
    assert any("the accounting are gone" in text for text in [*notes, written.getvalue()])
    assert (sys.version_info < (3, 11)) == (not notes)


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    watch = OomWatch(folder=tmp_path)
    watch.opened(_Engine())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="shapes"), Listeners([watch]).telling_errors():
        raise RuntimeError("shapes do not match")
    assert not list(tmp_path.iterdir())


def test_a_near_limit_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "group").mkdir()

    class Quiet(_Engine):
        def memory(self) -> dict[str, int]:
            return {"master_shards": 2**20}

    engine = Quiet()
    watch = OomWatch(folder=tmp_path)
    watch.opened(engine)  # type: ignore[arg-type]
    watch._group = ControlGroup(_group(tmp_path / "group", 2**30 + 2**26))
    for _ in range(3):
        watch.phase("after_forward")
    printed = caplog.text
    assert printed.count("is close to running out of memory") == 1
    assert "master_shards" in (tmp_path / "memory_limit_near.txt").read_text()


def test_a_twin_shares_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyLM(tied=True)
    model.register_buffer("known", torch.ones(3))
    model.first = [model.blocks[0]]  # a list of modules is no child
    meta_model = meta_copy(model)
    assert [n for n, _ in meta_model.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert meta_model.head.weight is meta_model.embed.weight and meta_model.head.weight.is_meta
    assert meta_model.first[0] is meta_model.blocks[0]
    assert not any(p.is_meta for p in model.parameters()) and not model.known.is_meta
    call = shapes_of({"ids": tokens(0, 0, 0), "attention_mask": torch.zeros(2, 9), "x": object()})
    assert call["ids"].is_meta and bool(call["attention_mask"].all()) and call["x"] is None
    with NoCollectives():  # type: ignore[no-untyped-call]
        assert meta_model(call["ids"]).shape == (2, 9, 257)


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_a_twin_has_nobody_to_log_to_and_does_not_say_so(
    namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lightning = pytest.importorskip(namespace)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.net(batch).sum()
            self.log("loss", loss)
            self.log_dict({"again": loss})
            self.print("said")
            return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = meta_copy(Module()).training_step(torch.empty(2, 4, device="meta"), 0)
    assert loss.is_meta and "said" not in capsys.readouterr().out
