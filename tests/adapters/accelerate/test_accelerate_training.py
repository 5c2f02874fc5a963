"""Native loops: parity with one process, accumulation, clipping, several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shardplug import ModelError, OptimizerError, ScheduleError
from tests.adapters.accelerate.common import (
    MAX_NORM,
    OPTIMIZERS,
    WORLD,
    accelerator,
    largest_difference,
    loader,
    reference,
    samples,
    seeded_model,
)
from tests.support.models import lm_loss, tokens
from tests.support.pool import RankPool


def train(
    stage: int, optimizer_name: str, window: int, epochs: int, zero: str = "", **model: Any
) -> Any:
    acc = accelerator(zero=zero or f"zero{stage}", gradient_accumulation_steps=window)
    # Ranks are seeded differently: everybody starts from rank 0's weights (case 14).
    net = seeded_model(7 + dist.get_rank(), **model)
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    net, optimizer, batches = acc.prepare(net, optimizer, loader(samples()))
    losses, norms = [], []
    for _ in range(epochs):
        for batch in batches:
            with acc.accumulate(net):
                loss = lm_loss(net(batch), batch)
                acc.backward(loss)
                losses.append(acc.reduce(loss.detach(), "mean").item())
                if acc.sync_gradients:
                    norms.append(acc.clip_grad_norm_(net.parameters(), MAX_NORM).item())
                optimizer.step()
                optimizer.zero_grad()
    sharded = [p for p in net.parameters() if type(p.data).__name__ == "DTensor"]
    return {
        "losses": losses,
        "norms": norms,
        "state": acc.get_state_dict(net),
        "steps": acc.completed_steps,
        "sharded": len(sharded),
    }


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_equals_one_process(
    pool: RankPool, stage: int, optimizer_name: str, window: int
) -> None:
    epochs = 4 if window == 3 else 2
    ranks = pool.run(train, WORLD, stage, optimizer_name, window, epochs)
    expected = reference(optimizer_name, window, epochs)
    assert ranks[0]["steps"] == len(expected["norms"]) >= 10
    assert ranks[0]["sharded"] > 10
    assert ranks[1]["state"] == {}
    assert largest_difference(ranks[0]["state"], expected["state"]) <= 2e-6
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    assert ranks[0]["norms"] == ranks[1]["norms"]


def test_tied_weights_train_as_in_one_process(pool: RankPool) -> None:
    ranks = pool.run(train, WORLD, 3, "adamw", 1, 2, tied=True)
    expected = reference("adamw", 1, 2, model=seeded_model(tied=True))
    state = ranks[0]["state"]
    assert largest_difference(state, expected["state"]) <= 2e-6
    assert state["head.weight"] is state["embed.weight"]


def test_replicas_train_as_in_one_process(pool: RankPool) -> None:
    ranks = pool.run(train, WORLD, 2, "sgd", 3, 4, zero="stage=2,replicate_size=2")
    expected = reference("sgd", 3, 4)
    assert largest_difference(ranks[0]["state"], expected["state"]) <= 2e-6
    assert ranks[1]["norms"] == pytest.approx(expected["norms"], rel=1e-6)


def leave_in_the_middle() -> dict[str, torch.Tensor]:
    """A loop left inside a window: the next epoch's first batches complete it, as in Accelerate."""
    acc = accelerator(zero="zero1", gradient_accumulation_steps=3)
    net = seeded_model()
    net, optimizer, batches = acc.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader(samples())
    )
    for stop in (5, 1):
        for index, batch in enumerate(batches):
            with acc.accumulate(net):
                acc.backward(lm_loss(net(batch), batch))
                optimizer.step()
                optimizer.zero_grad()
            if index + 1 == stop:
                break
    assert acc.completed_steps == 2 and acc.sync_gradients
    return acc.get_state_dict(net)


def test_a_loop_left_in_a_window_goes_on_with_it(pool: RankPool) -> None:
    ours = pool.run(leave_in_the_middle, WORLD)[0]
    net = seeded_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = samples().split(2 * WORLD)
    for index, batch in enumerate([*batches[:5], batches[0]]):
        (lm_loss(net(batch), batch) / 3).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(ours, net.state_dict()) <= 2e-6


def go_on_after_an_exception() -> dict[str, torch.Tensor]:
    acc = accelerator(zero="zero3", gradient_accumulation_steps=2)
    net = seeded_model()
    net, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    broken = []

    def fail(*_: Any) -> None:
        if broken:
            raise ValueError("a bad batch")

    net.blocks[1].register_forward_pre_hook(fail)
    rank = dist.get_rank()
    for step in range(3):
        for micro in range(2):
            if step == 1 and micro == 1:
                broken.append(True)
                with pytest.raises(ValueError, match="bad batch"), acc.accumulate(net):
                    net(tokens(9, 9, rank))
                broken.clear()
                acc.engine.reset()  # drops the window that was under way
                continue
            batch = tokens(step, micro, rank)
            with acc.accumulate(net):
                acc.backward(lm_loss(net(batch), batch))
                optimizer.step()
                optimizer.zero_grad()
    return acc.get_state_dict(net)


def test_training_goes_on_after_an_exception(pool: RankPool) -> None:
    ours = pool.run(go_on_after_an_exception, WORLD)[0]
    net = seeded_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in (0, 2):
        for micro in range(2):
            batch = torch.cat([tokens(step, micro, rank) for rank in range(WORLD)])
            (lm_loss(net(batch), batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(ours, net.state_dict()) <= 2e-6


def gradients_of_windows(stage: int, how: str) -> dict[str, torch.Tensor]:
    acc = accelerator(zero=f"zero{stage}", gradient_accumulation_steps=4)
    net = acc.prepare(seeded_model())
    optimizer = acc.prepare(torch.optim.SGD(net.parameters(), lr=0.0))
    rank = dist.get_rank()
    for micro in range(4):
        batch = tokens(0, micro, rank)
        if how == "accumulate":
            with acc.accumulate(net):
                acc.backward(lm_loss(net(batch), batch))
                assert acc.sync_gradients == (micro == 3)
                optimizer.step()
        elif how == "no_sync" and micro < 3:
            with acc.no_sync(net):
                acc.backward(lm_loss(net(batch), batch))
        else:  # every backward by itself
            acc.backward(lm_loss(net(batch), batch))
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in net.named_parameters()
    }


@pytest.mark.parametrize("how", ["accumulate", "no_sync", "plain"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulated_gradient_is_the_sum(pool: RankPool, stage: int, how: str) -> None:
    ours = pool.run(gradients_of_windows, WORLD, stage, how)[0]
    net = seeded_model()
    for micro in range(4):
        both = torch.cat([tokens(0, micro, rank) for rank in range(WORLD)])
        (lm_loss(net(both), both) / 4).backward()
    theirs = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert largest_difference(ours, theirs) <= 1e-6


def clip_kinds() -> dict[str, Any]:
    acc = accelerator(zero="zero3")
    net = acc.prepare(seeded_model())
    found: dict[str, Any] = {}
    batch = tokens(0, 0, dist.get_rank())
    for norm_type in (1.0, 2.0, float("inf")):
        net.zero_grad()
        acc.backward(lm_loss(net(batch), batch))
        before = acc.clip_grad_norm_(net.parameters(), float("inf"), norm_type=norm_type)
        again = acc.clip_grad_norm_(net.parameters(), before.item() / 10, norm_type=norm_type)
        after = acc.clip_grad_norm_(net.parameters(), float("inf"), norm_type=norm_type)
        assert before.item() == again.item()
        found[str(norm_type)] = (before.item(), after.item())
    net.zero_grad()
    acc.backward(lm_loss(net(batch), batch))
    acc.clip_grad_value_(net.parameters(), 1e-3)
    found["largest"] = max(
        float(p.grad.full_tensor().abs().max() if hasattr(p.grad, "full_tensor") else p.grad.abs())
        for p in net.parameters()
    )
    return found


def test_clipping_is_global_for_every_norm_and_by_value(pool: RankPool) -> None:
    ranks = pool.run(clip_kinds, WORLD)
    assert ranks[0] == ranks[1]
    both = torch.cat([tokens(0, 0, rank) for rank in range(WORLD)])
    for norm_type in (1.0, 2.0, float("inf")):
        net = seeded_model()
        lm_loss(net(both), both).backward()
        expected = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9, norm_type).item()
        before, after = ranks[0][str(norm_type)]
        assert before == pytest.approx(expected, rel=1e-6)
        assert after == pytest.approx(expected / 10, rel=1e-5)
    assert ranks[0]["largest"] == pytest.approx(1e-3)


def clip_inside_a_window() -> None:
    acc = accelerator(zero="zero2", gradient_accumulation_steps=2)
    net = acc.prepare(seeded_model())
    batch = tokens(0, 0, 0)
    with acc.accumulate(net):
        acc.backward(lm_loss(net(batch), batch))
        with pytest.raises(ScheduleError, match=r"if accelerator\.sync_gradients"):
            acc.clip_grad_norm_(net.parameters(), 1.0)
        with pytest.raises(ScheduleError, match=r"clip_grad_value_ was called inside"):
            acc.clip_grad_value_(net.parameters(), 1.0)


def step_after_a_backward_that_did_not_sync() -> None:
    acc = accelerator(zero="zero1")
    net = seeded_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = acc.prepare(net, optimizer)
    batch = tokens(0, 0, 0)
    with acc.no_sync(net):
        acc.backward(lm_loss(net(batch), batch))
    with pytest.raises(ScheduleError, match="last micro-batch"):
        optimizer.step()  # moved weights by nothing, without a word, in plain FSDP2 (case 3)


def test_a_step_or_clip_inside_a_window_is_refused(pool: RankPool) -> None:
    pool.run(clip_inside_a_window, WORLD)
    pool.run(step_after_a_backward_that_did_not_sync, WORLD)


def token_weighted(stage: int) -> tuple[dict[str, torch.Tensor], float]:
    """Rank 0 has 5 label tokens, rank 1 has 50, then none; two unequal micro-batches (case 4)."""
    acc = accelerator(zero=f"zero{stage}", gradient_accumulation_steps=2)
    net = acc.prepare(seeded_model())
    counts = token_counts(dist.get_rank())
    total = acc.gather(torch.tensor([sum(counts)])).sum()
    for micro, count in enumerate(counts):
        batch = tokens(0, micro, dist.get_rank(), batch=2, length=33)
        with acc.accumulate(net):
            loss = summed_loss(net(batch), batch, count)
            # The engine averages over ranks and Accelerate over the window: undo both.
            acc.backward(loss * acc.num_processes * acc.gradient_accumulation_steps / total)
    norm = acc.clip_grad_norm_(net.parameters(), float("inf")).item()
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in net.named_parameters()
    }, norm


def token_counts(rank: int) -> list[int]:
    return [[5, 0], [50, 7]][rank]


def summed_loss(logits: torch.Tensor, batch: torch.Tensor, count: int) -> torch.Tensor:
    labels = batch[:, 1:].flatten().clone()
    labels[count:] = -100
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")


@pytest.mark.parametrize("stage", [1, 3])
def test_gradient_does_not_depend_on_where_tokens_are(pool: RankPool, stage: int) -> None:
    ours, norm = pool.run(token_weighted, WORLD, stage)[0]
    net = seeded_model()
    total = sum(sum(token_counts(rank)) for rank in range(WORLD))
    for rank in range(WORLD):
        for micro, count in enumerate(token_counts(rank)):
            batch = tokens(0, micro, rank, batch=2, length=33)
            (summed_loss(net(batch), batch, count) / total).backward()
    theirs = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    a = torch.cat([ours[name].flatten() for name in theirs])
    b = torch.cat([grad.flatten() for grad in theirs.values()])
    assert F.cosine_similarity(a, b, dim=0) >= 0.999999
    assert norm == pytest.approx(float(b.norm()), rel=1e-6)


# -- several models --------------------------------------------------------------------------


class Adversaries:
    """A generator, a discriminator and the data of a GAN, small and odd."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.gen = nn.Sequential(nn.Linear(5, 13), nn.ReLU(), nn.Linear(13, 7))
        self.disc = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 1))
        self.opt_g = torch.optim.Adam(self.gen.parameters(), lr=1e-2)
        self.opt_d = torch.optim.Adam(self.disc.parameters(), lr=1e-2)

    @staticmethod
    def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return (
            torch.randn(4, 5, generator=generator),
            torch.randn(4, 7, generator=generator) + 1,
        )

    def step(self, noise: torch.Tensor, real: torch.Tensor, backward: Any) -> None:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = self.gen(noise)
        loss_d = F.binary_cross_entropy_with_logits(self.disc(real), ones)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(self.disc(fake.detach()), zeros)
        backward(loss_d)
        self.opt_d.step()
        self.opt_d.zero_grad()
        backward(F.binary_cross_entropy_with_logits(self.disc(fake), ones))
        self.opt_g.step()
        self.opt_g.zero_grad()
        self.opt_d.zero_grad()


def train_gan(stage: int, order: str) -> list[dict[str, torch.Tensor]]:
    acc = accelerator(zero=f"zero{stage}")
    gan = Adversaries()
    if order == "one call":
        gan.gen, gan.disc, gan.opt_g, gan.opt_d, batches = acc.prepare(
            gan.gen, gan.disc, gan.opt_g, gan.opt_d, loader(samples())
        )
        assert len(batches) == 7
    elif order == "shuffled":
        gan.opt_d, gan.gen, gan.disc, gan.opt_g = acc.prepare(
            gan.opt_d, gan.gen, gan.disc, gan.opt_g
        )
    elif order == "optimizers first":
        gan.opt_d, gan.opt_g = acc.prepare(gan.opt_d, gan.opt_g)
        gan.gen = acc.prepare(gan.gen)
        gan.disc = acc.prepare(gan.disc)
    else:  # models first, optimizers built from them
        gan.gen = acc.prepare(gan.gen)
        gan.disc = acc.prepare_model(gan.disc)
        gan.opt_g = acc.prepare(torch.optim.Adam(gan.gen.parameters(), lr=1e-2))
        gan.opt_d = acc.prepare_optimizer(torch.optim.Adam(gan.disc.parameters(), lr=1e-2))
    for step in range(6):
        gan.step(*gan.batch(step, dist.get_rank()), acc.backward)
    for optimizer in (gan.opt_g, gan.opt_d):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert len(held) == 4 and all(type(p.data).__name__ == "DTensor" for p in held)
        assert all(optimizer.state[p] for p in held)
    return [acc.get_state_dict(gan.gen), acc.get_state_dict(gan.disc)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_models_and_two_optimizers(pool: RankPool, stage: int) -> None:
    ours = pool.run(train_gan, WORLD, stage, "one call")[0]
    check_gan(ours)


@pytest.mark.parametrize("order", ["shuffled", "optimizers first", "separate"])
def test_prepare_takes_any_order(pool: RankPool, order: str) -> None:
    check_gan(pool.run(train_gan, WORLD, 3, order)[0])


def check_gan(ours: list[dict[str, torch.Tensor]]) -> None:
    gan = Adversaries()
    for step in range(6):
        parts = [gan.batch(step, rank) for rank in range(WORLD)]
        noise, real = (torch.cat(piece) for piece in zip(*parts, strict=True))
        gan.step(noise, real, lambda loss: loss.backward())
    for state, net in zip(ours, (gan.gen, gan.disc), strict=True):
        for name, tensor in net.state_dict().items():
            assert float((state[name] - tensor).abs().max()) <= 2e-6, name


def accumulate_over_two_models() -> list[dict[str, torch.Tensor]]:
    acc = accelerator(zero="zero2", gradient_accumulation_steps=2)
    gan = Adversaries()
    gen, disc, optimizer = acc.prepare(
        gan.gen,
        gan.disc,
        torch.optim.SGD([*gan.gen.parameters(), *gan.disc.parameters()], lr=0.1),
    )
    for step in range(4):
        noise, _ = gan.batch(step, dist.get_rank())
        with acc.accumulate(gen, disc):
            acc.backward(disc(gen(noise)).mean())
            optimizer.step()
            optimizer.zero_grad()
    return [acc.get_state_dict(gen), acc.get_state_dict(disc)]


def test_accumulate_over_two_models(pool: RankPool) -> None:
    ours = pool.run(accumulate_over_two_models, WORLD)[0]
    gan = Adversaries()
    optimizer = torch.optim.SGD([*gan.gen.parameters(), *gan.disc.parameters()], lr=0.1)
    for step in range(4):
        noise = torch.cat([gan.batch(step, rank)[0] for rank in range(WORLD)])
        (gan.disc(gan.gen(noise)).mean() / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    for state, net in zip(ours, (gan.gen, gan.disc), strict=True):
        for name, tensor in net.state_dict().items():
            assert float((state[name] - tensor).abs().max()) <= 2e-6, name


def teacher_and_student() -> tuple[torch.Tensor, torch.Tensor, float]:
    import copy

    acc = accelerator(zero="zero3")
    student = seeded_model()
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    student = acc.prepare(student)
    optimizer = acc.prepare(torch.optim.AdamW(student.parameters(), lr=1e-2))
    teacher = acc.prepare(teacher)
    batch = tokens(0, 0, dist.get_rank())
    with torch.no_grad():
        first = teacher(batch)
    for _ in range(3):
        acc.backward(F.mse_loss(student(batch), teacher(batch) * 2))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        last = teacher(batch)
        moved = float((student(batch) - last).abs().max())
    with pytest.raises(ScheduleError, match="deepcopy"):
        copy.deepcopy(student)
    return first, last, moved


def test_a_reference_model_without_optimizer(pool: RankPool) -> None:
    for rank, (first, last, moved) in enumerate(pool.run(teacher_and_student, WORLD)):
        batch = tokens(0, 0, rank)
        assert torch.allclose(first, seeded_model()(batch), atol=1e-5)
        assert torch.equal(first, last)
        assert moved > 1e-3


# -- optimizers and models that would train nothing ------------------------------------------


def refused() -> None:
    acc = accelerator(zero="zero3")
    net, other = seeded_model(), seeded_model(8)
    with pytest.raises(ModelError, match="nothing would be trained"):
        frozen = seeded_model().requires_grad_(False)
        acc.prepare(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="would train nothing"):
        acc.prepare(net, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="would train nothing"):
        acc.prepare(torch.optim.SGD(seeded_model(9).parameters(), lr=0.1))
    with pytest.raises(ModelError, match="DistributedDataParallel"):
        acc.prepare(nn.parallel.DistributedDataParallel(nn.Linear(3, 3)))
    spread = nn.Linear(3, 3)
    spread.hf_device_map = {"a": 0, "b": 1}  # type: ignore[assignment]
    with pytest.raises(ModelError, match="device_map"):
        acc.prepare(spread)


def optimizer_whose_model_never_comes() -> None:
    acc = accelerator(zero="zero3")
    optimizer = acc.prepare(torch.optim.SGD(seeded_model(9).parameters(), lr=0.1))
    net = acc.prepare(seeded_model())
    batch = tokens(0, 0, 0)
    with pytest.raises(OptimizerError, match="would train nothing"):
        acc.backward(lm_loss(net(batch), batch))
    assert optimizer is not None


def test_what_would_train_nothing_is_refused(pool: RankPool) -> None:
    pool.run(refused, WORLD)
    pool.run(optimizer_whose_model_never_comes, WORLD)
