"""What a process holds besides a plan, and when a setting is said to fit."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardplug.errors import OptimizerError
from shardplug.memory import plan
from shardplug.oom.remedies import Headroom, Remedy, in_words
from shardplug.plan.choices import Choice
from shardplug.plan.sizes.optimizer_probe import kind_of, likely_kind
from shardplug.process.limits import ControlGroup
from shardplug.process.overhead import (
    KEPT,
    RETURNED,
    Used,
    kept_by_malloc,
    kept_share,
    used_by_process,
    used_now,
)
from tests.support.models import TinyLM, lm_loss, tokens


def _choice() -> Choice:
    found = plan(
        TinyLM(),
        devices=2,
        device_memory_gib=4,
        device="cpu",
        loop="pytorch",
        precision="32-true",
        batch=tokens(0, 0, 0),
        loss=lambda model, batch: lm_loss(model(batch), batch),
    )
    return found.choices[0]


def test_besides_is_what_is_used_less_books_and_plan() -> None:
    used = Used(now=1000, most=1100, base=200)
    assert used.overhead(states=300, beyond=250) == 450
    assert used.overhead(states=300, beyond=650) == 200, "never less than at the start"
    assert replace(used, kept=150).overhead(states=300, beyond=250) == 300, "freed is not needed"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not say")
def test_what_malloc_keeps_is_what_was_freed() -> None:
    held = [bytes(2000) for _ in range(4000)]  # 8 MB in blocks of the heap
    before = kept_by_malloc()
    held = held[1::2]  # what is between them cannot leave the heap
    assert 1e6 < kept_by_malloc() - before < 8e6
    assert len(held) == 2000


def test_a_control_groups_use_is_this_processes(tmp_path: Path) -> None:
    base = dict.fromkeys(used_by_process(), 5)
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.max").write_text("1000\n")
    used = used_now(ControlGroup(tmp_path), base, processes=2)
    assert used is not None and used.most == used.now + 50 and used.base == 5
    assert used.limit.endswith("the control group's limit")
    assert used_now(ControlGroup(tmp_path), {}, processes=2) is None


def test_what_freed_memory_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert kept_share() == KEPT
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    assert kept_share() == RETURNED


def test_fits_is_said_only_with_room_to_spare() -> None:
    choice = _choice()
    size = choice.device
    room = Headroom(capacity=int(1.2 * size), error=0.08, outset=int(2.2 * size), kept=1.1)
    assert room.surely(choice)
    tight = [
        replace(room, capacity=int(1.05 * size)),  # off by what plans are
        replace(room, outset=int(2.0 * size)),  # grown by what the allocator keeps
    ]
    for one in tight:
        assert not one.over(choice) and not one.surely(choice)
    assert replace(tight[1], kept=RETURNED).surely(choice)
    assert replace(room, capacity=size - 1).over(choice) == 1
    words = [
        in_words(Remedy("it", 5, over, surely, 1.0, (), True))
        for over, surely in ((0, True), (0, False), (2**20, False))
    ]
    assert ", fits;" in words[0] and "just fits, may not" in words[1]
    assert "still 1 MiB too much" in words[2]


def test_a_step_that_compiles_itself_is_not_compiled_for_the_plan() -> None:
    """Under a dispatch mode torch would note that it cannot be compiled; real steps then fail."""

    def update(parameter: torch.Tensor) -> bool:
        parameter.sub_(1.0)
        return torch.compiler.is_compiling()

    seen: list[bool] = []

    class Compiled(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            compiled = torch.compile(update, backend="eager", fullgraph=True)
            seen.extend(compiled(p.detach()) for g in self.param_groups for p in g["params"])

    with torch.no_grad():
        mine = Compiled([torch.nn.Parameter(torch.ones(3))], lr=0.1)
        assert kind_of(mine, mine.param_groups[0]).name == "compiled"
        assert seen == [False]
        mine.step()
    assert seen == [False, True]


def test_an_optimizer_that_cannot_be_probed_is_taken_for_adam() -> None:
    class Factored(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["row"] = torch.zeros(parameter.shape[0])

    odd = Factored(TinyLM().parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="as large as its parameter"):
        kind_of(odd, odd.param_groups[0])
    assert likely_kind(odd).tensors == 2 and likely_kind(odd).name == "factored"

    class Mine(torch.optim.SGD):
        pass

    plain = likely_kind(Mine(TinyLM().parameters(), lr=0.1))
    assert (plain.tensors, plain.work) == (0, 0), "as its base class"
