"""The resumable DataLoader by itself, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from shardplug.errors import CheckpointError
from shardplug.integrations.data.loader import resumable


class Numbers(Dataset[Any]):
    """Samples with a random part, drawn in the loading process, and a count of the reads."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor([index, int(torch.randint(0, 10**6, ()))])


class Plain(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from (torch.tensor(index) for index in range(21))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Own(DataLoader[Any]):
    """Makes its iterator itself."""

    def __iter__(self) -> Any:
        return iter([torch.tensor(index) for index in range(7)])


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=seeded()),
    "weighted": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 26, 26)
    ),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(26)), 5, True)
    ),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "workers": lambda: DataLoader(Plain(), batch_size=4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        Plain(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "own": lambda: Own(Plain(), batch_size=4),
}


def epochs(loader: DataLoader[Any], count: int) -> Any:
    for _ in range(count):
        for batch in loader:
            torch.rand(3)  # what a model draws
            yield batch.tolist()


@pytest.mark.parametrize("after", [1, 3, 9])
@pytest.mark.parametrize("name", LOADERS)
def test_the_rest_is_the_same(name: str, after: int) -> None:
    torch.manual_seed(3)
    loader = resumable(LOADERS[name]())
    assert isinstance(loader, type(LOADERS[name]())) and resumable(loader) is loader
    batches: list[Any] = []
    state, random_state = {}, torch.get_rng_state()
    for batch in epochs(loader, 2):
        batches.append(batch)
        if len(batches) == after:
            state, random_state = loader.state_dict(), torch.get_rng_state()
    per_epoch = len(batches) // 2
    assert per_epoch > 3 and state
    pending = [random_state]
    torch.manual_seed(99)

    def restore() -> None:
        if pending:
            torch.set_rng_state(pending.pop())

    again = resumable(LOADERS[name](), restore)
    again.load_state_dict(state)
    rest = list(epochs(again, 2 - (after - 1) // per_epoch))
    assert rest == batches[after:]
    if isinstance(again.dataset, Numbers) and again.num_workers == 0 and name != "own":
        assert again.dataset.reads == sum(len(b) if name != "no batches" else 1 for b in rest)


def test_another_batch_size_continues_at_the_same_sample() -> None:
    loader = resumable(DataLoader(Plain(), batch_size=4))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    other = resumable(DataLoader(Plain(), batch_size=6))
    other.load_state_dict(state)
    assert next(iter(other)).tolist() == [12, 13, 14, 15, 16, 17]
    odd = resumable(DataLoader(Plain(), batch_size=5))
    odd.load_state_dict(state)
    with pytest.raises(CheckpointError, match="12 samples used in this epoch"):
        iter(odd)


def test_the_users_loader_is_left_alone() -> None:
    mine = DataLoader(Plain(), batch_size=4)
    assert type(resumable(mine)) is not DataLoader and type(mine) is DataLoader
    assert not hasattr(mine, "state_dict")
