"""Case 48: ranks generate texts of different lengths, or none, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ModelError, ScheduleError
from tests.support.models import VOCAB, tokens
from tests.support.parity import assert_sharded, raises_everywhere
from tests.support.pool import RankPool
from tests.support.traffic import Traffic

LENGTHS = (1, 12, 5)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


class Captioner(nn.Module):
    """A language model that is only a part of what is sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tower = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        self.lm = llama()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        seen = self.tower(batch[:, :5].float() / VOCAB).square().mean() * self.gain
        loss: torch.Tensor = self.lm(input_ids=batch, labels=batch).loss + seen
        return loss

    def describe(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Generate."""
        tokens_: torch.Tensor = self.lm.generate(*args, **kwargs)
        return tokens_


def prompt(rank: int, *, rows: int = 1) -> torch.Tensor:
    return tokens(3, 0, rank, batch=rows, length=4 + rank)


def options(rank: int, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": LENGTHS[rank], "do_sample": False, "eos_token_id": None, **more}


def make(stage: int, folder: str | None) -> tuple[ZeroEngine, Captioner, Captioner]:
    config = ZeroConfig(stage=stage)  # type: ignore[arg-type]
    if folder is not None:
        config = ZeroConfig.preset("zero3_infinity", nvme_path=folder)
    engine, model = ZeroEngine(config), Captioner()
    engine.shard(model, forward_methods=("describe",))
    return engine, model, Captioner()


def train(engine: ZeroEngine, model: nn.Module, reference: nn.Module) -> None:
    """The training after it equals one process that never generated."""
    ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    model.train()
    for step in range(3):
        for micro in range(2):
            with engine.micro_step(last=micro == 1):
                (model(tokens(step, micro, engine.rank)) / 2).backward()
            for rank in range(engine.world_size):
                loss = reference(tokens(step, micro, rank)) / 2 / engine.world_size
                loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5).item()
        assert engine.clip_grad_norm(0.5) == pytest.approx(norm, rel=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found, expected = engine.full_state_dict(rank0_only=False), reference.state_dict()
    assert found.keys() == expected.keys() and len(found) > 20
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-6, rtol=0, msg=name)


def generate_and_train(stage: int, folder: str | None = None) -> None:
    engine, model, reference = make(stage, folder)
    rank = engine.rank
    model.eval()
    reference.eval()
    everyone = [reference.lm.generate(prompt(r), **options(r)) for r in range(engine.world_size)]
    assert [one.shape[1] for one in everyone] == [4 + r + LENGTHS[r] for r in range(len(everyone))]
    # Without a context: ranks that are through go on with the others.
    with torch.no_grad():
        assert torch.equal(model.describe(prompt(rank), **options(rank)), everyone[rank])
    beams = options(rank, num_beams=2)
    expected = reference.lm.generate(prompt(rank), **beams)
    with torch.no_grad():
        assert torch.equal(model.describe(prompt(rank), **beams), expected)
    assert_sharded(model, plain=1)
    # With one: nothing is exchanged after the first gather, so rank 1 need not take part.
    with engine.gathered():
        traffic = Traffic()
        with traffic:
            if rank != 1:
                assert torch.equal(model.lm.generate(prompt(rank), **options(rank)), everyone[rank])
                assert torch.equal(model.lm.generate(prompt(rank), **beams), expected)
        assert not traffic.bytes, traffic.bytes
        whole = engine.memory()["gathered"]
    assert whole >= sum(p.numel() * 4 for p in reference.parameters() if p.ndim)
    assert_sharded(model, plain=1)
    assert engine.memory()["gathered"] == 0
    train(engine, model, reference)


def parts_and_nesting(stage: int) -> None:
    engine, model, reference = make(stage, None)
    rank = engine.rank
    expected = reference.lm.generate(prompt(rank), **options(rank))
    alone = sum(p.numel() * 4 for p in reference.lm.parameters())
    whole = alone + sum(p.numel() * 4 for p in reference.tower.parameters())
    for _ in range(2):
        with engine.gathered(model.lm):
            assert alone <= engine.memory()["gathered"]
            with engine.gathered(model.lm.model), engine.gathered():
                assert whole <= engine.memory()["gathered"]
                assert torch.equal(model.lm.generate(prompt(rank), **options(rank)), expected)
            held = engine.memory()["gathered"]
            assert alone <= held
            if rank == 0:
                assert torch.equal(model.lm.generate(prompt(rank), **options(rank)), expected)
            model(tokens(0, 0, rank))  # of all ranks: other parts come and go
            assert engine.memory()["gathered"] == held
        assert engine.memory()["gathered"] == 0
    message = "no state_dict"
    for part in (model, model.lm, model.lm.model.layers[0]):
        with raises_everywhere(ScheduleError, message), engine.gathered(), engine.gathered(part):
            try:
                part.state_dict()
            finally:  # nothing was sharded again by it
                assert whole <= engine.memory()["gathered"]
    with raises_everywhere(ScheduleError, message), engine.gathered():
        with engine.gathered():
            pass
        model.state_dict()
    assert_sharded(model, plain=1)
    assert len(model.state_dict()) > 20
    message = "gradients enabled"
    with raises_everywhere(ScheduleError, message), engine.gathered(), torch.enable_grad():
        model(tokens(0, 0, rank))
    with raises_everywhere(ModelError, "Linear"), engine.gathered(nn.Linear(2, 2)):
        pass
    with pytest.raises(KeyError), engine.gathered():
        raise KeyError("of the user's")
    assert engine.memory()["gathered"] == 0
    train(engine, model, reference)


def in_the_middle_of_a_window(stage: int) -> None:
    """Gradients that are accumulated so far stay."""
    engine, model, reference = make(stage, None)
    rank = engine.rank
    with engine.micro_step(last=False):
        model(tokens(0, 0, rank)).backward()
    with engine.gathered(model.lm):
        if rank == 0:
            model.lm.generate(prompt(rank), **options(rank))
    with engine.micro_step(last=True):
        model(tokens(0, 1, rank)).backward()
    for micro in range(2):
        for one in range(engine.world_size):
            (reference(tokens(0, micro, one)) / engine.world_size).backward()
    compared = 0
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        found = ours.grad.full_tensor() if ours.ndim else ours.grad
        torch.testing.assert_close(found, theirs.grad, atol=1e-6, rtol=1e-5, msg=name)
        compared += 1
    assert compared > 20


class Step(nn.Module):
    """A model whose evaluation step generates on ranks that have prompts only."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = llama()

    def evaluate(self, rows: int) -> None:
        """Generate for `rows` prompts."""
        if rows:
            self.lm.generate(prompt(0, rows=rows), max_new_tokens=2, eos_token_id=None)


def left_out(stage: int) -> None:
    engine, model = ZeroEngine(ZeroConfig(stage=stage)), Step()  # type: ignore[arg-type]
    engine.shard(model, forward_methods=("evaluate",))
    with engine.gathered():
        model.evaluate(1 - engine.rank)
    with raises_everywhere(ScheduleError, "same units in the same order"), torch.no_grad():
        model.evaluate(1 - engine.rank)
        dist.barrier()


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (2, 2), (2, 3), (3, 3), (1, 3)])
def test_tokens_equal_one_process(pool: RankPool, world_size: int, stage: int) -> None:
    pool.run(generate_and_train, world_size, stage, timeout=60)


def test_parameters_in_files(pool: RankPool, tmp_path: Path) -> None:
    pool.run(generate_and_train, 2, 3, str(tmp_path), timeout=60)


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_are_held_and_contexts_nest(pool: RankPool, stage: int) -> None:
    pool.run(parts_and_nesting, 2, stage, timeout=60)
    pool.run(in_the_middle_of_a_window, 2, stage, timeout=60)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_without_prompts_is_named_outside_the_context(pool: RankPool, stage: int) -> None:
    pool.run(left_out, 2, stage, timeout=30)
