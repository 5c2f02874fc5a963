"""Models that sharding by module boundaries gets wrong: ties, reads from outside, kept tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ModelError
from tests.support.models import VOCAB, Block, TinyLM, lm_loss, tokens
from tests.support.parity import (
    GRADIENTS,
    MicroLoss,
    assert_close,
    assert_same_weights,
    assert_sharded,
    gradients,
    raises_everywhere,
    reference_window,
    sharded_window,
    whole,
)
from tests.support.pool import RankPool

STAGES = (1, 2, 3)


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    return lm_loss(model(batch), batch)


def _compare(
    build: Callable[[], nn.Module],
    loss: MicroLoss,
    stage: int,
    *,
    steps: int = 3,
    accumulate: int = 2,
    plain: int = 0,
    **config: object,
) -> tuple[ZeroEngine, nn.Module, nn.Module]:
    """Train sharded and whole with SGD; gradients and weights are equal at every step."""
    torch.manual_seed(7)
    reference = build()
    torch.manual_seed(7)
    model = build()
    engine = ZeroEngine(ZeroConfig(stage=stage, **config))  # type: ignore[arg-type]
    engine.shard(model)
    ours = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        expected = reference_window(reference, loss, step, accumulate=accumulate)
        found = sharded_window(engine, model, loss, step, accumulate=accumulate)
        assert found == pytest.approx(expected.item(), rel=1e-5)
        assert_close(gradients(model), gradients(reference), GRADIENTS)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_sharded(model, plain=plain)
    assert_same_weights(engine, model, reference)
    return engine, model, reference


# ------------------------------------------------------------------ tied weights (69)


class _ThreeWay(TinyLM):
    """Input embedding, head and a second output of one weight."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.extra = nn.Linear(18, VOCAB)
        self.extra.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.extra(x)


class _AcrossBlocks(TinyLM):
    """Two of three blocks share a weight, and another shares one with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.final = nn.Linear(37, 18, bias=False)
        self.final.weight = self.blocks[1].down.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + self.final(F.pad(x, (0, 19)))))


class _SharedBlock(TinyLM):
    """One block object that stands in two places (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


def _ties(stage: int) -> None:
    for build in (lambda: TinyLM(tied=True), _ThreeWay, _AcrossBlocks, _SharedBlock):
        plain = 1
        _, model, reference = _compare(build, _loss, stage, plain=plain)
        assert len(list(model.parameters())) == len(list(reference.parameters()))
    engine, model, _ = _compare(_ThreeWay, _loss, stage, plain=1, steps=1)
    assert model.embed.weight is model.head.weight is model.extra.weight


# ------------------------------------------------------------------ weights read outside (70)


class _FusedHead(TinyLM):
    """The head's weight is read by the loss; the head is never called."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.head.weight) * self.scale


class _Attention(nn.Module):
    """nn.MultiheadAttention reads its out_proj; encoder layers have a fast path in eval."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.layers: nn.Module
        if layers:
            layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2)
        else:
            self.layers = nn.MultiheadAttention(12, 2, batch_first=True)
        self.head = nn.Linear(12, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        x = (
            self.layers(x)
            if isinstance(self.layers, nn.TransformerEncoder)
            else (x + self.layers(x, x, x)[0])
        )
        return self.head(x)


def _outside_reads(stage: int) -> None:
    _compare(_FusedHead, _loss, stage, plain=1)
    for layers in (True, False):
        for units in ("auto", ("TransformerEncoderLayer",) if layers else ("MultiheadAttention",)):
            engine, model, reference = _compare(
                lambda layers=layers: _Attention(layers), _loss, stage, units=units
            )
            batch = tokens(77, 0, engine.rank)
            for context in (torch.no_grad(), torch.enable_grad()):
                with context:
                    expected = reference.eval()(batch)
                    torch.testing.assert_close(model.eval()(batch), expected, atol=1e-5, rtol=1e-5)
            engine.reshard()
            assert_sharded(model)


def _fused_loss_outside(stage: int) -> None:
    """A loss function that reads `model.head.weight` after the forward: right, or an error."""
    torch.manual_seed(7)
    model = TinyLM()
    reference = copy.deepcopy(model)

    def features(self: TinyLM, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    engine = ZeroEngine(ZeroConfig(stage=stage))
    for one in (model, reference):
        one.forward = features.__get__(one)  # type: ignore[method-assign]
    engine.shard(model)
    for micro in range(2):
        for rank in range(engine.world_size):
            batch = tokens(0, micro, rank)
            logits = F.linear(reference(batch), reference.head.weight)
            (lm_loss(logits, batch) / engine.world_size).backward()
    refused = False
    for micro in range(2):
        batch = tokens(0, micro, engine.rank)
        with engine.micro_step(last=micro == 1):
            try:
                lm_loss(F.linear(model(batch), model.head.weight), batch).backward()
            except RuntimeError as error:
                assert "DTensor" in str(error)
                refused = True
    if refused:
        engine.reset()
        return
    ours, theirs = gradients(model), gradients(reference)
    assert theirs.pop("scale") is None and ours.pop("scale") is None
    assert_close(ours, theirs, GRADIENTS)


# ------------------------------------------------------------------ kept tensors (71)


class _RoutedBlock(nn.Module):
    """Two experts mixed by a router whose logits go to an auxiliary loss, and a probe."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.router = nn.Linear(18, 2)
        self.experts = nn.ModuleList(Block(18, 11) for _ in range(2))
        self.probe = nn.Linear(18, 3)  # does not feed the block's output
        self.keep = keep
        self.aux: Any = None

    def forward(self, x: torch.Tensor, into: Any) -> torch.Tensor:
        """x: (b, s, 18)."""
        logits = self.router(x)
        weights = logits.softmax(-1)
        out = sum(weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))
        kept = torch.cat([logits, self.probe(x)], -1)
        if self.keep == "attribute":
            self.aux = kept
        elif self.keep == "list":
            self.aux = [kept]
        elif self.keep == "dict":
            self.aux = {"kept": kept}
        elif self.keep == "list argument":
            into.append(kept)
        elif self.keep == "dict argument":
            into[f"block {len(into)}"] = kept
        return out  # type: ignore[return-value]


class _Routed(nn.Module):
    """The router loss is computed after the blocks' outputs, from what they kept."""

    def __init__(self, keep: str, use_output: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 18)
        self.blocks = nn.ModuleList(_RoutedBlock(keep) for _ in range(3))
        self.head = nn.Linear(18, VOCAB)
        self.keep = keep
        self.use_output = use_output
        self.collected: list[torch.Tensor] = []
        if keep == "hook":  # how transformers collects router logits
            for block in self.blocks:
                block.router.register_forward_hook(lambda *call: self.collected.append(call[-1]))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch: tokens (b, s) -> loss ()."""
        into: Any = {"start": self.embed.weight[0] * 2} if "dict" in self.keep else []
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x, into)
        if self.keep.endswith("argument"):
            kept = list(into.values()) if isinstance(into, dict) else into
            assert len(kept) == 3 + isinstance(into, dict)
        elif self.keep == "hook":
            kept, self.collected = self.collected, []
        else:
            kept = [block.aux for block in self.blocks]
            kept = [aux[0] if self.keep == "list" else aux for aux in kept]
            kept = [aux["kept"] if self.keep == "dict" else aux for aux in kept]
        assert len(kept) >= 3
        loss = 0.1 * sum(aux.square().mean() for aux in kept)
        return loss + lm_loss(self.head(x), batch) if self.use_output else loss


class _Distilled(TinyLM):
    """The loss uses hidden states of inner blocks, and calls the head twice."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch: tokens (b, s) -> loss ()."""
        x = self.embed(batch)
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        early = lm_loss(self.head(self.norm(states[0])), batch)
        late = lm_loss(self.head(self.norm(x)), batch)
        return early + late + sum(s.square().mean() for s in states) * self.scale


class _Cached(TinyLM):
    """Hidden states are kept on the model, and the loss is computed outside the forward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        self.states = []
        for block in self.blocks:
            x = block(x)
            self.states.append(x)
        return self.head(self.norm(x)) * self.scale


def _direct(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(tokens(step, micro, rank))
    return loss


def _cached_loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    loss = _loss(model, step, micro, rank)
    return loss + sum(s.square().mean() for s in model.states)  # type: ignore[return-value,union-attr]


def _only_cached_loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    _loss(model, step, micro, rank)
    return sum(s.square().mean() for s in model.states)  # type: ignore[return-value,union-attr]


def _kept_outputs(stage: int) -> None:
    for keep in ("attribute", "list", "dict", "list argument", "dict argument"):
        _compare(lambda keep=keep: _Routed(keep), _direct, stage, steps=2)
        _compare(lambda keep=keep: _Routed(keep, use_output=False), _direct, stage, steps=2)
    _compare(lambda: _Routed("hook"), _direct, stage)
    if stage == 3:  # nothing leads the backward into the unit first: never a wrong number
        with raises_everywhere(RuntimeError, "storage"):
            _compare(lambda: _Routed("hook", use_output=False), _direct, stage, steps=1)
    else:
        _compare(lambda: _Routed("hook", use_output=False), _direct, stage, steps=2)
    _compare(_Distilled, _direct, stage, plain=1)
    _compare(_Cached, _cached_loss, stage, plain=1)
    _compare(_Cached, _only_cached_loss, stage, plain=1, steps=2)


# ------------------------------------------------------------------ frozen parts (61)


class _FrozenMiddle(TinyLM):
    """A frozen block between trainable ones; it also gets an input that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(18, 18)
        self.blocks[1].requires_grad_(False)
        inner = self.blocks[1].forward
        self.blocks[1].forward = lambda x, extra=None: inner(x)  # type: ignore[method-assign]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        x = self.blocks[0](x)
        x = self.blocks[1](x, extra=self.unused(x))
        return self.head(self.norm(self.blocks[2](x))) * self.scale


class _FrozenFirst(TinyLM):
    """Frozen embedding and first blocks, each block recomputed in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        for frozen in (self.embed, self.blocks[0], self.blocks[1]):
            frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        if self.reentrant:
            x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x)) * self.scale


class _FrozenInput(nn.Module):
    """A frozen block whose only trainable input is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(18))
        self.lm = TinyLM()
        self.lm.blocks[0].requires_grad_(False)
        inner = self.lm.blocks[0].forward
        self.lm.blocks[0].forward = lambda x, extra: inner(x.detach())  # type: ignore[method-assign]
        self.lm.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.lm.blocks[0](self.lm.embed(tokens), self.prompt * 2)
        return self.lm.head(self.lm.norm(self.lm.blocks[1](x))) * self.lm.scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        logits: torch.Tensor = self.lm(tokens)
        return logits


def _frozen_parts(stage: int) -> None:
    builds = (
        _FrozenMiddle,
        _FrozenInput,
        lambda: _FrozenFirst(True),
        lambda: _FrozenFirst(False),
    )
    for build in builds:
        torch.manual_seed(7)
        start = build().state_dict()
        engine, model, _ = _compare(build, _loss, stage, plain=1)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert torch.equal(whole(parameter), start[name]), name
        batch = tokens(0, 0, engine.rank)
        lm_loss(model(batch), batch).backward()
        assert engine.memory()["gathered"] == 0
        assert_sharded(model, plain=1)


# ------------------------------------------------------------------ freezing on the way (60)


def _freeze_and_unfreeze(stage: int) -> None:
    torch.manual_seed(7)
    model = TinyLM()
    reference = copy.deepcopy(model)
    engine = ZeroEngine(ZeroConfig(stage=stage))
    for one in (model, reference):
        one.blocks.requires_grad_(False)
    engine.shard(model)
    pairs = []
    for one in (reference, model):
        trained = [p for p in one.parameters() if p.requires_grad]
        pairs.append((one, torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)))
    engine.prepare_optimizer(pairs[1][1])

    def phase(steps: range, frozen: tuple[str, ...], grad_none: tuple[str, ...] = ()) -> None:
        start = engine.full_state_dict(model, rank0_only=False)
        for step in steps:
            reference_window(reference, _loss, step, accumulate=2)
            sharded_window(engine, model, _loss, step, accumulate=2)
            for one, optimizer in pairs:
                for name in grad_none:
                    one.get_parameter(name).grad = None
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(engine, model, reference)
        end = engine.full_state_dict(model, rank0_only=False)
        for name in start:
            held = name.startswith(frozen) or name in grad_none
            assert torch.equal(start[name], end[name]) == held, name

    phase(range(3), ("blocks.",))
    for one, optimizer in pairs:  # unfreeze one block, with a group of its own
        one.blocks[1].requires_grad_(True)
        group = {"params": list(one.blocks[1].parameters()), "lr": 5e-4}
        optimizer.add_param_group(group)
    phase(range(3, 6), ("blocks.0", "blocks.2"))
    for one, _ in pairs:  # freeze again what has moments already
        one.blocks[1].requires_grad_(False)
        one.embed.requires_grad_(False)
    phase(range(6, 9), ("blocks.", "embed"))
    for one, _ in pairs:
        one.embed.requires_grad_(True)
    phase(range(9, 12), ("blocks.",), grad_none=("head.weight",))
    assert [group["lr"] for group in pairs[1][1].param_groups] == [1e-3, 5e-4]


def _unfrozen_in_bf16(stage: int) -> None:
    """A unit that was frozen at the first forward has fp32 masters and gradients later."""
    torch.manual_seed(7)
    model = TinyLM()
    reference = copy.deepcopy(model)
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype="bf16"))
    for one in (model, reference):
        one.blocks[1].requires_grad_(False)
    engine.shard(model)
    ours = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            for one in (model, reference):
                one.blocks[1].requires_grad_(True)
        reference_window(reference, _loss, step, accumulate=2)
        sharded_window(engine, model, _loss, step, accumulate=2)
        grads = gradients(model)
        assert all(g.dtype == torch.float32 for g in grads.values() if g is not None)
        assert_close(grads, gradients(reference), 2e-2)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    # Reduced in fp32: the mean of the ranks' bf16 gradients is finer than bf16.
    weight = grads["blocks.1.up.weight"]
    assert weight is not None and not torch.equal(weight, weight.bfloat16().float())
    assert_same_weights(engine, model, reference, 1e-2)
    model = TinyLM().bfloat16()
    model.blocks[1].requires_grad_(False)
    engine.shard(model)
    _loss(model, 0, 0, engine.rank).backward()
    engine.after_backward()
    model.blocks[1].requires_grad_(True)
    with raises_everywhere(ModelError, "blocks.1.norm.weight", "fp32 master weights"):
        _loss(model, 0, 0, engine.rank)


# ------------------------------------------------------------------ parameters used by some (51)


class _TwoBranches(nn.Module):
    """Two vision-like branches of equal size, and text blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()
        self.left = Block(18, 5)
        self.right = Block(18, 5)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        """batch: tokens (b, s) -> logits (b, s, VOCAB)."""
        x = self.lm.embed(batch)
        if left:
            x = self.left(x) * self.gain
        if right:
            x = self.right(x)
        return self.lm.head(self.lm.norm(self.lm.blocks[0](x))) * self.lm.scale


def _branch_loss(use: Callable[[int, int, int], tuple[bool, bool]]) -> MicroLoss:
    def loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        batch = tokens(step, micro, rank)
        return lm_loss(model(batch, *use(step, micro, rank)), batch)

    return loss


def _some_ranks(stage: int, accumulate: int, param_dtype: str | None) -> None:
    """(a) and (c): what a rank did not use counts zero; what no rank used has no gradient."""
    uses = {
        "one rank uses both": lambda step, micro, rank: (rank == 0, rank == 0),
        "different ones, of equal size": lambda step, micro, rank: (rank == 0, rank == 1),
        "in some micro-batches": lambda step, micro, rank: (micro == rank, step % 2 == 0),
        "by turns, nobody or all": lambda step, micro, rank: (step % 2 == 0, step == 3),
        "never": lambda step, micro, rank: (False, False),
    }
    for use in uses.values():
        torch.manual_seed(7)
        model = _TwoBranches()
        reference = copy.deepcopy(model)
        engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype=param_dtype))
        engine.shard(model)
        ours = engine.prepare_optimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)
        )
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.5)
        loss = _branch_loss(use)
        for step in range(2 if param_dtype else 4):
            reference_window(reference, loss, step, accumulate=accumulate)
            sharded_window(engine, model, loss, step, accumulate=accumulate)
            exact = param_dtype is None
            assert_close(gradients(model), gradients(reference), GRADIENTS if exact else 2e-2)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            assert_same_weights(engine, model, reference, 2e-6 if exact else 1e-2)


# ------------------------------------------------------------------ copies (74), odd tensors (77)


def _copies(stage: int) -> None:
    torch.manual_seed(7)
    policy = TinyLM()
    teacher = copy.deepcopy(policy)
    reference = copy.deepcopy(policy)
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(policy)
    engine.shard(teacher.requires_grad_(False))
    optimizer = engine.prepare_optimizer(torch.optim.SGD(policy.parameters(), lr=0.1))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    frozen = copy.deepcopy(reference)
    for step in range(3):
        reference_window(reference, _loss, step)
        sharded_window(engine, policy, _loss, step)
        batch = tokens(step, 9, engine.rank)
        with torch.no_grad():
            found, expected = teacher(batch).log_softmax(-1), frozen(batch).log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
    assert_same_weights(engine, policy, reference)
    assert_same_weights(engine, teacher, frozen, 0)
    with raises_everywhere(Exception, "deepcopy"):
        copy.deepcopy(policy)
    assert engine.models == [policy, teacher]
    assert_same_weights(engine, policy, reference)


class _OddTensors(TinyLM):
    """Scalars, integer weights, bool and complex buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.6))
        self.codes = nn.Parameter(
            torch.arange(-7, 8, dtype=torch.int8).view(5, 3), requires_grad=False
        )
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("waves", torch.randn(3, 2, dtype=torch.complex64))
        self.register_buffer("hidden", torch.randn(4).half(), persistent=False)
        self.register_buffer("steps", torch.tensor(11))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        factor = self.codes.float().sum() + self.count + self.waves.real.mean() * self.mask.sum()
        return super().forward(tokens) * self.logit_scale.exp() * factor * 0.01


def _odd_tensors(stage: int) -> None:
    torch.manual_seed(7)
    start = _OddTensors()
    engine, model, reference = _compare(_OddTensors, _loss, stage, plain=4)
    assert not torch.equal(reference.logit_scale, start.logit_scale)
    exported = engine.full_state_dict(model, rank0_only=False)
    assert exported["logit_scale"].shape == () and exported["empty"].shape == (0, 4)
    for name in ("codes", "count", "mask", "waves", "steps"):
        assert exported[name].dtype == start.state_dict()[name].dtype
        assert torch.equal(exported[name], start.state_dict()[name]), name
    for name, buffer in start.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert isinstance(model.codes, DTensor)
    torch.manual_seed(dist.get_rank())  # rank 0's integers, booleans and complex numbers win
    model = _OddTensors()
    with torch.no_grad():
        model.mask.fill_(bool(dist.get_rank()))
        model.codes += dist.get_rank()
    engine.shard(model)
    assert not model.mask.any() and torch.equal(whole(model.codes), start.codes)
    waves = [torch.empty_like(model.waves.real) for _ in range(engine.world_size)]
    dist.all_gather(waves, model.waves.real.contiguous())
    assert all(torch.equal(wave, waves[0]) for wave in waves)


# ------------------------------------------------------------------ recomputation (68)


class _Inside(TinyLM):
    """Checkpoints a part of each block, inside the unit."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)


def _recomputed(stage: int) -> None:
    """The reference is not checkpointed: gradients are equal all the same."""
    torch.manual_seed(7)
    builds = ((TinyLM, True), (_Inside, False), (lambda: TinyLM(tied=True), True))
    for build, ours in builds:
        _compare(build, _loss, stage, plain=1, activation_checkpointing=ours)
    calls = []
    torch.manual_seed(7)
    model = TinyLM()
    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: calls.append(1))
    engine = ZeroEngine(ZeroConfig(stage=stage, activation_checkpointing=True))
    engine.shard(model)
    batch = tokens(0, 0, engine.rank)
    lm_loss(model(batch), batch).backward()
    assert len(calls) == 6  # each block ran twice


# ------------------------------------------------------------------ tests


def _structures(stage: int) -> None:
    _ties(stage)
    _outside_reads(stage)
    _fused_loss_outside(stage)
    _kept_outputs(stage)


def _states(stage: int) -> None:
    _frozen_parts(stage)
    _freeze_and_unfreeze(stage)
    _unfrozen_in_bf16(stage)
    _copies(stage)
    _odd_tensors(stage)
    _recomputed(stage)


def _unused(stage: int) -> None:
    for accumulate in (1, 3):
        for param_dtype in (None, "bf16"):
            _some_ranks(stage, accumulate, param_dtype)


@pytest.mark.parametrize("stage", STAGES)
def test_ties_reads_and_kept_tensors(pool: RankPool, stage: int) -> None:
    """Cases 69, 70, 71."""
    pool.run(_structures, 2, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_copied_odd_and_recomputed(pool: RankPool, stage: int) -> None:
    """Cases 60, 61, 68, 74, 77."""
    pool.run(_states, 2, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_some_ranks_use(pool: RankPool, stage: int) -> None:
    """Case 51 (a) and (c)."""
    pool.run(_unused, 2, stage)
