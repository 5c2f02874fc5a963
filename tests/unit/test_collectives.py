"""The CPU ranks' own gather and reduction, against torch's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardplug.core.ranks.collective_order import CollectiveOrder
from shardplug.core.ranks.peer import InFlight, PeerGather, PeerReduce, ReplicaSum
from shardplug.errors import ScheduleError
from tests.support.parity import raises_everywhere
from tests.support.pool import RankPool


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _same_as_torch(async_op: bool) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    order = CollectiveOrder(_group(), compare=True)
    order.units.append("a unit")
    gather = PeerGather(order, 0)
    reduce = PeerReduce(order, 0, InFlight(), lambda dtype: False)
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(rank)
        mine = torch.randn(5).to(dtype)
        found = gather.allocate((world_size * 5,), dtype=dtype, device=mine.device)
        work = gather(found, mine, _group(), async_op=async_op)
        assert (work is None) != async_op
        if work is not None:
            work.wait()
        expected = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(expected, mine)
        assert torch.equal(found, torch.cat(expected))
        inside = torch.zeros(world_size * 5, dtype=dtype)  # the input is a part of the output
        part = inside.view(world_size, 5)[rank]
        part.copy_(mine)
        gather(inside, part, _group())
        assert torch.equal(inside, found)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        torch.manual_seed(100 + rank)
        mine = torch.randn(world_size * 4)
        found = reduce.allocate((4,), dtype=mine.dtype, device=mine.device)
        reduce(found, mine.clone(), _group(), op)
        total = mine.clone()
        dist.all_reduce(total)
        expected_part = total.view(world_size, 4)[rank] / (
            1 if op is dist.ReduceOp.SUM else world_size
        )
        torch.testing.assert_close(found, expected_part, atol=1e-6, rtol=1e-6)
    with raises_everywhere(NotImplementedError, "SUM or AVG"):
        reduce(found, mine, _group(), dist.ReduceOp.MAX)
    order.require_end()


def _sums_over_replicas(late: bool) -> None:
    """As torch's, and to the bit the sum in rank order; more and fewer elements than ranks."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    order, in_flight = CollectiveOrder(_group(), compare=True), InFlight()
    order.units.append("a unit")
    replicas = ReplicaSum(order, 0, _group(), in_flight, lambda dtype: late)
    for size in (1, 7, 1000):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            parts = [torch.rand(size, generator=torch.Generator().manual_seed(r)) for r in range(4)]
            expected = parts[0].clone()
            for part in parts[1:world_size]:
                expected += part
            if op == dist.ReduceOp.AVG:
                expected /= world_size
            found = parts[rank].clone()
            dist.all_reduce(found, op=op, group=replicas)
            if late:
                assert torch.equal(found, parts[rank])  # nobody has waited yet
                in_flight.complete()
            assert torch.equal(found, expected), (size, op)
    with pytest.raises(ValueError):  # torch's own, and the one behind it is kept
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX, group=replicas)
    assert isinstance(replicas.error, NotImplementedError)


def _late_reductions() -> None:
    """One reduction is under way at a time, and the last one is completed at the end."""
    order = CollectiveOrder(_group(), compare=True)
    in_flight = InFlight()
    outputs = []
    for unit in range(3):
        order.units.append(f"unit {unit}")
        reduce = PeerReduce(order, unit, in_flight, lambda dtype: True)
        outputs.append(torch.full((2,), -1.0))
        part = torch.full((4,), float(unit + 1 + dist.get_rank()))
        reduce(outputs[-1], part, _group(), dist.ReduceOp.SUM)
        if unit:
            assert torch.equal(outputs[unit - 1], torch.full((2,), 2.0 * unit + 1))
    in_flight.complete()
    in_flight.complete()
    assert torch.equal(outputs[2], torch.full((2,), 7.0))


def _orders_that_part() -> str:
    """The rank that is ahead with another use must not wait for it before it sees the first."""
    order = CollectiveOrder(_group(), compare=True)
    order.units += ["left", "right"]
    order.announce("gather", 0)
    second = order.announce("gather" if dist.get_rank() else "reduce", 1)
    if dist.get_rank():
        order.announce("reduce", 0)
    error = ""
    try:
        second.confirm()
    except ScheduleError as caught:
        error = str(caught)
    for again in (second.confirm, order.require_end, lambda: order.announce("gather", 0)):
        with raises_everywhere(ScheduleError, error):
            again()
    return error


def _first_to_leave(folder: str) -> str:
    """One rank ends at once when it finds the difference, the other has yet to look."""
    order = CollectiveOrder(_group(), compare=True)
    order.units += ["left", "right"]
    check = order.announce("gather", dist.get_rank())
    if dist.get_rank():
        with raises_everywhere(ScheduleError, "rank 0 gathers left; rank 1 gathers right"):
            check.confirm()
        os._exit(1)
    while True:  # until the other's connections are closed
        try:
            dist.send(torch.ones(1), 1, tag=7)
            dist.recv(torch.ones(1), 1, tag=7)
        except RuntimeError:
            break
    with raises_everywhere(ScheduleError, "rank 0 gathers left; rank 1 gathers right"):
        order.announce("gather", 1)
    Path(folder, "told").touch()
    return ""


def _gone_without_a_word(folder: str) -> None:
    order = CollectiveOrder(_group(), compare=True)
    order.units.append("left")
    dist.barrier()  # an order that is being made asks for messages of the other rank already
    if dist.get_rank():
        os._exit(1)
    with raises_everywhere(RuntimeError, "gathers left", "first error of the other ranks"):
        order.announce("gather", 0).confirm()
    Path(folder, "said").touch()


def _checksums() -> None:
    order = CollectiveOrder(_group(), compare=False)
    order.announce("gather", dist.get_rank()).confirm()  # nothing is compared at once
    total = torch.tensor(order.checksum)
    dist.all_reduce(total)
    with raises_everywhere(ScheduleError, "orders differ", "mixed"):
        order.require_same(int(total))
    order.restart()
    order.announce("gather", 3)
    order.require_same(order.checksum * dist.get_world_size())


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_direct_messages_equal_torch(pool: RankPool, world_size: int) -> None:
    for async_op in (False, True):
        pool.run(_same_as_torch, world_size, async_op)


def test_late_reductions_arrive(pool: RankPool) -> None:
    pool.run(_late_reductions, 2)


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_sums_over_replicas_equal_torch(pool: RankPool, world_size: int) -> None:
    for late in (False, True):
        pool.run(_sums_over_replicas, world_size, late)


def test_a_difference_is_named_where_the_other_rank_has_left(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(_first_to_leave, 2, str(tmp_path), expect_death=True)
    assert (tmp_path / "told").exists()
    pool.run(_gone_without_a_word, 2, str(tmp_path), expect_death=True)
    assert (tmp_path / "said").exists()


def test_orders_that_part_are_told_on_every_rank(pool: RankPool) -> None:
    errors = pool.run(_orders_that_part, 2)
    assert errors[0] == errors[1]
    assert "rank 0 reduces the gradients of right; rank 1 gathers right" in errors[0]
    pool.run(_checksums, 2)
