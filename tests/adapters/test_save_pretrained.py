"""`save_pretrained` of sharded Hugging Face models, and calls that one rank makes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import CheckpointError, ScheduleError
from shardplug.integrations.common import comm
from tests.adapters.accelerate.common import accelerator
from tests.adapters.hf_trainer.common import build
from tests.support.pool import RankPool

ALONE = ("Another rank is gone", "did not answer in time", "Make this call on every rank")


def with_adapter(base: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    made = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return made


class Pushes(nn.Module):
    """Has the interface of the hub's models, with nothing but a folder and names of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 5) -> (b, 3)."""
        y: torch.Tensor = self.linear(x)
        return y

    def save_pretrained(self, folder: Path, variant: str = "") -> None:
        torch.save(self.state_dict(), folder / f"weights{variant}.pt")

    def push_to_hub(self, folder: Path) -> str:
        self.save_pretrained(folder, variant="-pushed")
        return "pushed"


def saves(out: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = ZeroEngine(ZeroConfig(stage=3))
    tied, adapted, pushes = build(), with_adapter(build(tied=False)), Pushes()
    inside = nn.Sequential(build(seed=5))
    for model in (tied, adapted, pushes, inside):
        engine.shard(model)
    rows = torch.arange(6, 18).reshape(2, 6)
    tied(input_ids=rows, labels=rows).loss.backward()
    engine.after_backward()
    tied.save_pretrained(out / "tied")
    adapted.save_pretrained(str(out / "adapter"))
    inside[0].save_pretrained(save_directory=out / "inside", max_shard_size="20KB")
    pushes.save_pretrained(out)
    assert pushes.push_to_hub(out) == ("pushed" if engine.rank == 0 else None)
    dist.barrier()
    for name, seed, same in (("tied", 0, True), ("inside", 5, True)):
        loaded = AutoModelForCausalLM.from_pretrained(out / name)
        assert_same(loaded, build(seed=seed, tied=same))
    loaded = PeftModel.from_pretrained(build(tied=False), out / "adapter")
    assert_same(loaded, with_adapter(build(tied=False)))
    for name in ("weights.pt", "weights-pushed.pt"):
        torch.testing.assert_close(torch.load(out / name), Pushes().state_dict(), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"save_pretrained\(\) failed on rank 0: .*missing"):
        pushes.save_pretrained(out / "missing" / "folder")
    with (
        engine.gathered(tied),
        pytest.raises(ScheduleError, match=r"no state_dict\(\) while parameters are held"),
    ):
        tied.save_pretrained(out / "held")
    whole = engine.full_state_dict(tied)
    tied.save_pretrained(out / "given", state_dict=whole, is_main_process=engine.rank == 0)
    assert "save_pretrained" in vars(tied) and "state_dict" not in vars(tied)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_save_pretrained_writes_whole_weights(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saves, 2, tmp_path)


def alone(call: str, out: Path) -> None:
    """One rank makes a call, the other one does not, and ends."""
    run = accelerator(zero="zero3", cpu=True)
    model = run.prepare(build())
    engine = run.engine
    rows = torch.arange(6, 18).reshape(2, 6)
    run.backward(model(input_ids=rows, labels=rows).loss)
    calls = {
        "get_state_dict()": lambda: run.get_state_dict(model),
        "save_model()": lambda: run.save_model(model, out),
        "save_pretrained()": lambda: model.save_pretrained(out),
        "full_state_dict()": engine.full_state_dict,
        "Saving": lambda: run.save_state(out),
        "wait_for_everyone()": run.wait_for_everyone,
        "Clipping or grad_norm()": lambda: run.clip_grad_norm_(model.parameters(), 1.0),
        "A barrier": lambda: comm.barrier(torch.device("cpu")),
        "A broadcast": lambda: comm.broadcast({"path": 1}),
        "A reduction": lambda: comm.reduce(torch.ones(2)),
    }
    if dist.get_rank() == 0:
        with pytest.raises((CheckpointError, ScheduleError)) as caught:
            calls[call]()
        text = str(caught.value)
        assert text.startswith(call) and all(part in text for part in ALONE), text
    # Rank 1 takes part in nothing more.


@pytest.mark.parametrize(
    "call",
    [
        "get_state_dict()",
        "save_model()",
        "save_pretrained()",
        "full_state_dict()",
        "Saving",
        "wait_for_everyone()",
        "Clipping or grad_norm()",
        "A barrier",
        "A broadcast",
        "A reduction",
    ],
)
def test_a_rank_that_calls_alone_is_told(call: str, pool: RankPool, tmp_path: Path) -> None:
    pool.run(alone, 2, call, tmp_path / "out", group_timeout=10.0)
