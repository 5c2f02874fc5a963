"""`strict` both ways: names of both kinds, shapes, parameters and groups that came or went."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import Reader, load_model
from shardplug.errors import CheckpointError
from tests.dist.checkpoint_runs import (
    Run,
    assert_equal,
    make_run,
    refused,
    sharded,
    snapshot,
    tensors_of,
    train,
)
from tests.support.models import TinyLM
from tests.support.pool import RankPool


class WithHead(TinyLM):
    """A module more than TinyLM."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(18, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (b, s) -> logits (b, s, VOCAB)."""
        return super().forward(ids) + 0 * self.value.weight.sum()


@contextmanager
def warned(*parts: str) -> Iterator[None]:
    """One of the warnings on this rank holds all `parts`; those of rank 0 alone count there."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    texts = [str(warning.message) for warning in said]
    if dist.get_rank() == 0:
        assert any(all(part in text for part in parts) for text in texts), texts


def _strictness(root: str) -> None:
    """Case 31."""
    run = make_run("plain", 2)
    train(run, range(2))
    saved = snapshot(run.model, run.optimizer)
    run.engine.save(f"{root}/plain", optimizers=[run.optimizer])

    more = sharded(WithHead())
    refused(
        more, f"{root}/plain", "Missing in the checkpoint: value.weight, value.bias",
        "Not in the model: none", "strict=False",
    )  # fmt: skip
    own_head = snapshot(more.model)["weight value.weight"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        more.engine.load(f"{root}/plain", optimizers=[more.optimizer], strict=False)
    texts = [str(warning.message) for warning in said if "strict" in str(warning.message)]
    assert len(texts) == (1 if dist.get_rank() == 0 else 0)
    assert all("value.weight, value.bias" in text for text in texts)
    found = snapshot(more.model, more.optimizer)
    assert torch.equal(found["weight value.weight"], own_head)
    assert_equal(tensors_of(saved), {k: found[k] for k in tensors_of(saved)})
    with warned("left as they were: value.weight, value.bias. Not in the model"):
        read = Reader(f"{root}/plain").model_state(0, more.model, strict=False)
    assert len(read) == sum(key.startswith("weight ") for key in saved) > 15
    assert Reader(f"{root}/plain").load(more.model, strict=False) == [
        (["value.weight", "value.bias"], [])
    ]

    fewer = TinyLM()
    del fewer.blocks[2]
    fewer_run = sharded(fewer)
    refused(
        fewer_run, f"{root}/plain", "Missing in the checkpoint: none",
        "Not in the model: blocks.2.norm.weight", "blocks.2.down.weight",
    )  # fmt: skip
    fewer_run.engine.load(f"{root}/plain", optimizers=[fewer_run.optimizer], strict=False)
    found = tensors_of(snapshot(fewer_run.model, fewer_run.optimizer))
    assert len(found) > 20
    assert_equal(found, {k: saved[k] for k in found})

    both = WithHead()
    del both.blocks[0]
    refused(sharded(both), f"{root}/plain", "value.bias", "blocks.2.up.bias")

    wide = sharded(TinyLM(hidden=39))
    for strict in (True, False):
        refused(
            wide, f"{root}/plain", "blocks.0.up.weight: (37, 18) in the checkpoint, (39, 18) here",
            "blocks.2.down.weight", strict=strict,
        )  # fmt: skip
    whole = TinyLM(hidden=39).state_dict()
    with pytest.raises(CheckpointError, match=r"blocks.0.up.weight: \(39, 18\)"):
        load_model(run.model, whole, strict=False)

    other = sharded(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    refused(other, f"{root}/plain", "no name is the same", "0.weight", strict=False)

    for bad, text in (("extra", "Not in the model: extra"), ("norm.bias", "Missing in the")):
        state = {**TinyLM().state_dict(), "extra": torch.zeros(2)}
        state = state if bad == "extra" else {k: v for k, v in state.items() if k != bad}
        with pytest.raises(CheckpointError, match=text):
            load_model(run.model, state)
    missing, unexpected = load_model(run.model, state, strict=False)
    assert (missing, unexpected) == (["norm.bias"], ["extra"])


def with_groups(model: TinyLM, groups: dict[str, float]) -> Run:
    """Shard a model and train modules in groups of their own, by name with a learning rate."""
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(model)
    parts = dict(model.named_modules())
    held = [
        {
            "params": [p for n in names.split() for p in parts[n].parameters()],
            "lr": lr,
            "name": names,
        }
        for names, lr in groups.items()
    ]
    return Run(engine, model, engine.prepare_optimizer(torch.optim.AdamW(held)))


def _groups_come_and_go(root: str) -> None:
    """At W = 2; loaded with other groups at W = 3."""
    path = f"{root}/groups"
    if dist.get_world_size() == 2:
        torch.manual_seed(3)
        run = with_groups(TinyLM(), {"embed head": 1e-2, "blocks": 2e-2, "norm": 3e-2})
        train(run, range(2))
        run.engine.save(path, optimizers=[run.optimizer])
        torch.save(snapshot(run.model, run.optimizer), f"{root}/expected")
        return
    expected = torch.load(f"{root}/expected")

    # A group is gone, the others have changed places.
    fewer = with_groups(TinyLM(), {"norm": 9.0, "blocks": 9.0})
    refused(fewer, path, "at most 2 parameter groups", "got 3", "strict=False")
    with warned("optimizer state for embed.weight, head.weight", "AdamW does not train"):
        fewer.engine.load(path, optimizers=[fewer.optimizer], strict=False)
    assert [group["lr"] for group in fewer.optimizer.param_groups] == [3e-2, 2e-2]
    assert [group["name"] for group in fewer.optimizer.param_groups] == ["norm", "blocks"]
    found = tensors_of(snapshot(fewer.model, fewer.optimizer))
    left_out = [key for key in expected if key.startswith(("state 0 embed.", "state 0 head."))]
    assert len(left_out) == 6 and not found.keys() & set(left_out) and len(found) > 60
    assert_equal({key: expected[key] for key in found}, found)
    train(fewer, range(2, 3))
    assert {float(s["step"]) for s in fewer.optimizer.state.values()} == {3.0}

    # A module is new, in a group of its own and in an old one; another group is not there.
    for groups in ({"blocks": 9.0, "value": 8.0}, {"blocks value": 9.0}):
        more = with_groups(WithHead(), groups)
        refused(more, path, "Missing in the checkpoint: value.weight, value.bias")
        with warned("left as they were: value.weight, value.bias"):
            more.engine.load(path, optimizers=[more.optimizer], strict=False)
        rates = [group["lr"] for group in more.optimizer.param_groups]
        assert rates == [2e-2, 8.0][: len(groups)]  # a new group keeps its own
        assert not more.optimizer.state.keys() & set(more.model.value.parameters())
        train(more, range(2, 3))
        counts = {n: float(more.optimizer.state[p]["step"]) for n, p in
                  more.model.named_parameters() if p in more.optimizer.state}  # fmt: skip
        assert counts["value.weight"] == 1.0 and counts["blocks.1.up.weight"] == 3.0


def test_groups_come_and_go(pool: RankPool, tmp_path: Path) -> None:
    for world_size in (2, 3):
        pool.run(_groups_come_and_go, world_size, str(tmp_path))


def test_strict_true_and_false(pool: RankPool, tmp_path: Path) -> None:
    """Case 31."""
    pool.run(_strictness, 2, str(tmp_path))
