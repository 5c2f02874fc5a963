"""Streams that end early on one rank, and losses by tokens, through the adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from shardplug.errors import ConfigError
from shardplug.windows import Windows
from tests.adapters.accelerate.common import accelerator
from tests.adapters.lightning.modules import (
    Data,
    Net,
    Plain,
    assert_at_rest,
    assert_close,
    build,
    make_optimizer,
    reference,
    trainer,
    whole,
)
from tests.dist.test_windows import batches, nll_sum
from tests.dist.test_windows import reference as by_tokens
from tests.support.models import TinyLM

LENGTHS = (5, 3)


class Stream(IterableDataset[Any]):
    """Rank 0 has five batches of four, rank 1 three."""

    def __init__(self, batches_by_rank: tuple[int, ...] = LENGTHS) -> None:
        self.lengths = batches_by_rank

    def __iter__(self) -> Iterator[Any]:
        rank, data = dist.get_rank(), Data(100)
        for index in range(4 * self.lengths[rank]):
            yield data[2 * index + rank]


def expected(module: Any, micro_batches: int, window: int, epochs: int) -> Any:
    data = Data(100)
    optimizer = make_optimizer("adamw", module.parameters(), 1e-2)
    for _ in range(epochs):
        for index in range(micro_batches):
            rows = slice(8 * index, 8 * index + 8)
            (module.loss((data.x[rows], data.y[rows], None)) / window).backward()
            if (index + 1) % window == 0 or index + 1 == micro_batches:
                optimizer.step()
                optimizer.zero_grad()
    return module


def with_lightning() -> None:
    module = build()
    run = trainer("zero3", max_epochs=2, accumulate_grad_batches=2, num_sanity_val_steps=1)
    train = DataLoader(Stream(), batch_size=4)
    validate = DataLoader(Stream((2, 1)), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, train, validate)
    messages = [str(one.message) for one in caught]
    ended = [message.partition(" on rank 1")[0] for message in messages if "ended" in message]
    # The sanity check reads one batch of the validation's; each epoch then ends by itself.
    assert ended == [f"Stream ended after {count} batches" for count in (3, 1, 3, 1)]
    assert len(module.losses) == 6 and run.global_step == 4
    assert_close(whole(module), expected(reference(), 3, 2, 2).state_dict(), 5e-6)
    assert_at_rest(module)
    run.test(module, DataLoader(Stream((2, 1)), batch_size=4), verbose=False)
    limited = trainer("zero3", max_epochs=1, limit_train_batches=2)
    limited.fit(build(), DataLoader(Stream(), batch_size=4))
    assert limited.global_step == 2


def lengths_differ() -> None:
    rank = dist.get_rank()
    loader = DataLoader(Data(20 - 8 * rank), batch_size=4)
    run = trainer("zero3", use_distributed_sampler=False)
    with pytest.raises(ConfigError, match=r"got \[5, 3\] by rank"):
        run.fit(build(), loader)
    run = trainer("zero3", use_distributed_sampler=False, limit_train_batches=3)
    run.fit(build(), loader)
    assert run.global_step == 3


def with_accelerate() -> None:
    from accelerate.utils import DataLoaderConfiguration

    run = accelerator(
        cpu=True,
        zero="zero3",
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
    )
    module: Any = build(Net)
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-2)
    # Each rank's stream is read whole, and every other batch of it taken.
    loader = DataLoader(Stream((10, 6)), batch_size=4)
    module, optimizer, loader = run.prepare(module, optimizer, loader)
    steps = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            with run.accumulate(module):
                run.backward((module(batch[0]) - batch[1]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
    assert steps == 3 and run.completed_steps == 2
    assert any("after 3 batches on rank 1" in str(one.message) for one in caught)
    for value in run.get_state_dict(module).values():
        assert torch.isfinite(value).all()


def tokens_with_accelerate() -> None:
    torch.manual_seed(7)
    run = accelerator(cpu=True, zero="zero2")
    model: Any = TinyLM()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    for window in Windows(batches(dist.get_rank()), accumulate=2):
        for rows, last in window:
            with nullcontext() if last else run.no_sync(model):
                run.backward(nll_sum(model, rows) * window.scale)
        optimizer.step()
        optimizer.zero_grad()
    state = run.get_state_dict(model)
    if run.is_main_process:
        assert_close(state, by_tokens()[-1])


class ByTokens(Plain):
    """Trains on windows: one batch of Lightning's is one optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(7)
        self.net = TinyLM()  # type: ignore[assignment]

    def training_step(self, window: Any, index: int) -> None:
        for rows, last in window:
            with nullcontext() if last else self.trainer.strategy.block_backward_sync():
                self.manual_backward(nll_sum(self.net, rows) * window.scale)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def tokens_with_lightning() -> None:
    module = ByTokens()
    trainer("zero3").fit(module, Windows(batches(dist.get_rank()), accumulate=2))
    assert_close(whole(module.net), by_tokens()[-1])


def test_lightning_stops_on_all_ranks(pool: Any) -> None:
    pool.run(with_lightning, 2, timeout=60)


def test_lightning_names_lengths_that_differ(pool: Any) -> None:
    pool.run(lengths_differ, 2, timeout=60)


def test_accelerate_stops_on_all_ranks(pool: Any) -> None:
    pool.run(with_accelerate, 2, timeout=60)


def test_every_token_counts_the_same(pool: Any) -> None:
    pool.run(tokens_with_accelerate, 2, timeout=60)
    pool.run(tokens_with_lightning, 2, timeout=60)
