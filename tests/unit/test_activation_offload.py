"""What autograd saves, in CPU memory: moved once, back as it was, and only what is worth it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardplug.core.activations.activation_offload import LEAST_BYTES, ActivationOffload
from shardplug.core.activations.host_copies import InPlaceCopies
from shardplug.core.activations.unit_hooks import follow_model
from shardplug.errors import ConfigError, ModelError

SIDE = 64
BYTES = SIDE * SIDE * 4
assert BYTES >= 2 * LEAST_BYTES


class LateCopies:
    """Copies that happen as late as they may, as on a stream that lags behind."""

    are_late = True

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        self.most = 0

    def _later(self, target: torch.Tensor, source: torch.Tensor) -> None:
        ref = weakref.ref(source.untyped_storage())
        size = source.numel()
        begin = source.storage_offset()

        def copy() -> None:
            storage = ref()
            assert storage is not None, "the original went before it was copied"
            flat = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (size,), (1,))
            target.copy_(flat)

        self.queue.append(copy)
        self.most = max(self.most, len(self.queue) - self.done)

    def out(self, source: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(source, 255)
        self._later(host, source)
        return host

    def back(self, host: torch.Tensor) -> torch.Tensor:
        self.mark_and_run()  # earlier copies, which keep their order
        device = torch.full_like(host, 255)
        ref, kept = weakref.ref(device), host

        def copy() -> None:
            target = ref()
            assert target is not None, "the memory went before it was written"
            target.copy_(kept)

        self.queue.append(copy)
        return device

    def mark_and_run(self) -> None:
        self.wait(self.mark())

    def mark(self) -> int:
        return len(self.queue)

    def wait(self, token: int) -> None:
        while self.done < token:
            self.queue[self.done]()
            self.done += 1


KINDS = (InPlaceCopies, LateCopies)


def make(copies: Any = InPlaceCopies, prefetch: int = 1, **options: Any) -> ActivationOffload:
    return ActivationOffload(copies(), torch.device("cpu"), prefetch, **options)


@contextmanager
def moving(offload: ActivationOffload) -> Iterator[None]:
    offload.begin()
    try:
        yield
    finally:
        offload.end()


def moved(offload: ActivationOffload) -> tuple[int, int]:
    offload.end_step()
    return offload.last_step


def leaf(seed: int = 0, *, side: int = SIDE) -> torch.Tensor:
    return torch.randn(side, side, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def both_ways(compute: Callable[[torch.Tensor], torch.Tensor], copies: Any) -> tuple[int, int]:
    """Compare a gradient with the one without offload; return the bytes moved."""
    x, y, offload = leaf(), leaf(), make(copies)
    compute(x).sum().backward()
    with moving(offload):
        result = compute(y)
    assert offload.held_bytes > 0
    result.sum().backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    assert offload.held_bytes == 0
    return moved(offload)


@pytest.mark.parametrize("copies", KINDS)
def test_a_tensor_saved_by_several_operations_and_views_is_moved_once(copies: Any) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()  # saves its result
        one, two = y.chunk(2, dim=1)  # interleaved views
        return (
            y * y.t()
            + y.view(-1)[: SIDE * SIDE].view(SIDE, SIDE).sin()
            + one.sum() * two.cos().sum()
        )

    out, back = both_ways(compute, copies)
    # y, and the sum of one half is a number; sin, cos and the products save y itself.
    assert out == back == BYTES


@pytest.mark.parametrize("copies", KINDS)
def test_every_layout_and_kind_of_number_comes_back_as_it_was(copies: Any) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        mask = (x.detach() > 0).repeat(4, 4)  # integers and masks are saved too
        places = torch.arange(SIDE).flip(0).repeat(SIDE)
        wide = x[:, :1].expand(SIDE, SIDE)  # stride 0
        every_other = (x.t() * 2)[::2].sin()
        half = x.to(torch.bfloat16).exp().float()
        complex_ = torch.view_as_complex(torch.stack((x, x.cos()), -1))
        return (
            torch.where(mask, x.repeat(4, 4), 0.0).sum()
            + x.sigmoid().view(-1)[places].sum()
            + (wide.exp() * wide.sin()).sum()
            + every_other.sum()
            + half.sum()
            + (complex_ * complex_.conj().exp()).abs().sum()
        )

    out, back = both_ways(compute, copies)
    assert out == back > 4 * BYTES


def test_small_tensors_parameters_and_storages_to_keep_stay() -> None:
    weight, kept = nn.Parameter(torch.randn(SIDE, SIDE)), torch.randn(SIDE, SIDE)
    offload = make(own_storages=lambda: [kept.untyped_storage()])
    x = torch.randn(4, SIDE, requires_grad=True)  # 1 KiB
    with moving(offload):
        y = F.linear(x, weight)
        z = (y * y).sum() + (weight.t() * kept.t()).sum() + (weight * kept[0]).sum()
    # weight.t() is a view of a parameter that no one has named.
    assert offload.held_bytes == BYTES
    offload.keep([weight.untyped_storage()])
    with moving(offload):
        w = (weight.t() * kept.t()).sum()
    assert offload.held_bytes == BYTES
    (z + w).backward()
    assert moved(offload) == (BYTES, BYTES)


def test_a_view_of_a_small_part_is_moved_alone() -> None:
    large = torch.randn(64 * SIDE, SIDE)
    offload, x = make(), leaf()
    with moving(offload):
        y = (x * large[SIDE : 2 * SIDE]).sum() + (x * large[SIDE : 2 * SIDE]).sum()
    y.backward()
    assert moved(offload) == (BYTES, BYTES)
    assert x.grad is not None and torch.equal(x.grad, 2 * large[SIDE : 2 * SIDE])


@pytest.mark.parametrize("copies", KINDS)
def test_memory_that_changes_later_is_never_silently_wrong(copies: Any) -> None:
    x, offload = leaf(), make(copies)
    with moving(offload):
        y = x.exp()
        z = y.sin()  # saves y
        y.add_(1)  # torch without hooks would refuse the backward
        w = y.cos()
    assert offload.held_bytes == 2 * BYTES  # other values, another copy
    if copies is LateCopies:
        with pytest.raises(RuntimeError, match="modified by an inplace operation while it was"):
            (z + w).sum().backward()
        return
    (z + w).sum().backward()
    before = x.detach().exp()
    assert x.grad is not None
    expected = (before.cos() - (before + 1).sin()) * before
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("copies", KINDS)
def test_backwards_through_a_kept_graph(copies: Any) -> None:
    x, offload = leaf(), make(copies)
    with moving(offload):
        y = x.exp().sin().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    z = x.exp().sin().sum()
    (expected,) = torch.autograd.grad(z, x, create_graph=True)
    (twice,) = torch.autograd.grad(expected.sum(), x)
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert torch.equal(third, twice)


class Blocks(nn.Module):
    """Blocks that can fail, and a head."""

    def __init__(self, count: int = 4, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(count))
        self.recompute = recompute
        self.fails_at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number == self.fails_at:
                raise ValueError("in the middle")
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x).sin()
        return x.exp().cos()


def followed(model: Blocks, copies: Any, prefetch: int = 1) -> ActivationOffload:
    offload = make(copies, prefetch)
    offload.keep(p.untyped_storage() for p in model.parameters())
    follow_model(offload, (), list(model.blocks))
    model.register_forward_pre_hook(lambda *_: offload.begin())
    model.register_forward_hook(lambda *_: offload.end(), always_call=True)
    return offload


@pytest.mark.parametrize("copies", KINDS)
@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("prefetch", (0, 1, 3))
def test_blocks_leave_one_by_one_and_the_head_stays(
    copies: Any, recompute: bool, prefetch: int
) -> None:
    model, x = Blocks(recompute=recompute), leaf(3)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    offload = followed(model, copies, prefetch)
    for _ in range(2):
        y, z = model(x), model(x)  # two graphs at once
        # Each saves its input and, not recomputed, what the sine takes; exp and cos are the head's.
        inputs = 4 if recompute else 4 + 3  # the last sine is after the last block
        assert offload.held_bytes == 2 * inputs * BYTES
        (y + z).sum().backward()
        del y, z
        assert offload.held_bytes == 0
        assert moved(offload) == (2 * inputs * BYTES, 2 * inputs * BYTES)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, 2 * two)
        model.zero_grad()


def test_a_failed_forward_and_one_without_gradients() -> None:
    model, x = Blocks(), leaf(3)
    offload = followed(model, LateCopies)
    model.fails_at = 2
    with pytest.raises(ValueError, match="in the middle"):
        model(x)
    gc.collect()
    assert offload.held_bytes == 0
    y = x.exp()  # the hooks are gone
    assert offload.held_bytes == 0 and y.requires_grad
    model.fails_at = -1
    moved(offload)
    model(x).sum().backward()
    out, back = moved(offload)
    assert out == back > 0
    with torch.no_grad():
        model(x)
    assert moved(offload) == (0, 0)


def test_a_forward_without_saved_tensors_hooks_is_refused_by_name(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model, x = Blocks(), leaf(3)
    offload = followed(model, LateCopies)
    refused = pytest.raises(ConfigError, match=r"offload_activations.*switched off.*not here")
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), refused:
        model(x)
    assert not [w for w in recwarn if "silenced" in str(w.message)]
    model(x).sum().backward()
    out, back = moved(offload)
    assert out == back > 0


def test_no_more_originals_are_kept_than_two_blocks_have() -> None:
    model = Blocks(8)
    offload = followed(model, LateCopies)
    copies = offload._copies
    model(leaf(3)).sum().backward()
    assert copies.most <= 4  # type: ignore[attr-defined]  # two of each block


def test_what_came_back_and_is_not_used() -> None:
    model, x = Blocks(), leaf(3)
    offload = followed(model, LateCopies)
    y = model(x)
    # Only the last block's own: what comes back ahead is dropped with the graph.
    torch.autograd.grad(y.sum(), model.blocks[-1].weight)
    assert offload._copies.done < len(offload._copies.queue)  # type: ignore[attr-defined]
    del y
    offload._copies.mark_and_run()  # type: ignore[attr-defined]
    assert offload.held_bytes == 0


def test_what_autograd_shall_hold_goes_with_the_graph() -> None:
    offload, x = make(), leaf()
    with moving(offload):
        y = x.exp()
        ref = weakref.ref(y)
        z = y.sin()
    del y, z
    assert ref() is None and offload.held_bytes == 0  # no cycle
    with moving(offload):
        small = x[:2].exp()  # stays, and is a result that its own node saves
        ref = weakref.ref(small)
    del small
    assert ref() is None


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="repeated blocks to offload the activations of"):
        follow_model(make(), (), ())
