"""Losses weighted by tokens over ranks and micro-batches, and data that ends early on one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ConfigError, ScheduleError
from shardplug.windows import Windows, count_labels, in_step
from tests.support.models import TinyLM, tokens
from tests.support.parity import raises_everywhere, whole
from tests.support.pool import RankPool

LABELS = ((7, 20, 1, 13, 4), (3, 0, 26, 9, 11))  # of each rank's micro-batches


def batch(micro: int, rank: int) -> dict[str, torch.Tensor]:
    """One row of 27 tokens, of which some are trained on."""
    labels = tokens(5, micro, rank, batch=1, length=27)
    labels[:, 1 + LABELS[rank][micro] :] = -100
    return {"tokens": labels.clamp(min=0), "labels": labels}


def batches(rank: int, number: int = 5) -> list[dict[str, torch.Tensor]]:
    return [batch(micro, rank) for micro in range(number)]


def nll_sum(model: nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(rows["tokens"])[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, rows["labels"][:, 1:].flatten(), reduction="sum")


def reference(window: int = 2) -> list[dict[str, torch.Tensor]]:
    """Train one process on the mean over all tokens of each step; return weights per step."""
    torch.manual_seed(7)
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    for first in range(0, 5, window):
        parts = [batch(m, r) for m in range(first, min(first + window, 5)) for r in range(2)]
        count = sum(count_labels(part["labels"]) for part in parts)
        for part in parts:
            (nll_sum(model, part) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states


def plain_loop(stage: int) -> None:
    torch.manual_seed(7)
    engine, model = ZeroEngine(ZeroConfig(stage=stage)), TinyLM()  # type: ignore[arg-type]
    engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expected, steps = reference(), 0
    for window in Windows(batches(engine.rank), accumulate=2):
        first = 2 * steps
        assert window.tokens == sum(sum(row[first : first + 2]) for row in LABELS)
        for rows, last in window:
            with engine.micro_step(last=last):
                (nll_sum(model, rows) * window.scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in expected[steps].items():
            found = whole(model.state_dict()[name])
            torch.testing.assert_close(found, value, atol=2e-6, rtol=0, msg=name)
        steps += 1
    assert steps == 3 and len(window) == 1


def ends_early() -> None:
    rank = int(torch.distributed.get_rank())
    mine = batches(rank)[: 5 - 2 * rank]  # five and three
    with raises_everywhere(ScheduleError, "got [4, 3] by rank", "uneven='stop'"):
        list(Windows(mine, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        windows = list(Windows(iter(mine), 2, uneven="stop"))
    assert [len(window) for window in windows] == [2, 1]
    assert windows[1].tokens == LABELS[0][2] + LABELS[1][2]
    assert "got [4, 3] by rank. All stop after 3" in str(caught[0].message)
    assert [len(window) for window in Windows(batches(rank, 4), 2)] == [2, 2]
    assert not list(Windows([], 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(in_step(mine))) == 3
        assert len(list(in_step([]))) == 0
    assert len(caught) == 1 and "ended after 3 batches on rank 1" in str(caught[0].message)
    failing(rank)


def failing(rank: int) -> None:
    """An error of the data on one rank ends all of them."""

    def broken() -> Iterator[Any]:
        yield batch(0, rank)
        if rank == 1:
            raise OSError("the drive is gone")
        yield batch(1, rank)

    kind, text = (OSError, "the drive is gone") if rank else (ScheduleError, "failed on rank 1")
    for read in (lambda: list(Windows(broken(), 2)), lambda: list(in_step(broken()))):
        with pytest.raises(kind, match=text):
            read()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_token_counts_the_same(pool: RankPool, stage: int) -> None:
    pool.run(plain_loop, 2, stage)


def test_ranks_stop_together_or_are_named(pool: RankPool) -> None:
    pool.run(ends_early, 2)


def test_one_process_needs_no_group() -> None:
    (window,) = Windows([batch(0, 0), batch(1, 0)], 2)
    assert window.tokens == 27 and window.scale == 1 / 27
    assert [last for _, last in window] == [False, True]
    assert len(list(in_step([1, 2]))) == 2
    (empty,) = Windows([{"labels": torch.full((1, 4), -100)}])
    assert empty.scale == 1.0
    (counted,) = Windows([torch.zeros(3)], count=len)
    assert counted.tokens == 3
    with pytest.raises(ConfigError, match="Expected batches with 'labels'"):
        list(Windows([torch.zeros(3)]))
    with pytest.raises(ConfigError, match="accumulate of at least 1"):
        Windows([], 0)
    with pytest.raises(ConfigError, match="'raise' or 'stop'"):
        Windows([], uneven="join")  # type: ignore[arg-type]
