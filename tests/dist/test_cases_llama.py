"""A tiny Hugging Face Llama: ties, checkpointing, meta initialisation, generation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ModelError
from tests.support.models import VOCAB, tokens
from tests.support.parity import (
    GRADIENTS,
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


def _llama(*, tied: bool = False, device: str = "cpu") -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config)
    return model


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def _train(
    engine: ZeroEngine, model: nn.Module, reference: nn.Module, steps: int, accumulate: int = 2
) -> None:
    ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(steps):
        expected = reference_window(reference, _loss, step, accumulate=accumulate)
        found = sharded_window(engine, model, _loss, step, accumulate=accumulate)
        assert found == pytest.approx(expected.item(), rel=1e-5)
        assert assert_close(gradients(model), gradients(reference), GRADIENTS) > 15
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5).item()
        assert engine.clip_grad_norm(0.5) == pytest.approx(norm, rel=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_sharded(model)
    assert_same_weights(engine, model, reference)


def _parity(stage: int, tied: bool, recompute: str | None) -> None:
    model, reference = _llama(tied=tied), _llama(tied=tied)
    if recompute in ("reentrant", "not reentrant"):
        options = {"use_reentrant": recompute == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if recompute == "reentrant":
        model.enable_input_require_grads()
    engine = ZeroEngine(ZeroConfig(stage=stage, activation_checkpointing=recompute == "engine"))
    calls = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.shard(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    _loss(model, 0, 0, engine.rank).backward()
    assert len(calls) == (4 if recompute else 2)  # layers ran again in the backward
    model.zero_grad()
    _train(engine, model, reference, 6 if recompute is None else 3)


def _frozen_base_recomputed(stage: int) -> None:
    """Adapters on a frozen base, whose layers are recomputed."""
    models = []
    for _ in range(2):
        model = _llama()
        model.requires_grad_(False)
        for layer in model.model.layers:
            torch.manual_seed(11)
            layer.adapter = nn.Linear(32, 32, bias=False)
            layer.mlp.register_forward_hook(
                lambda _, args, out, layer=layer: out + layer.adapter(args[0])
            )
        models.append(model)
    model, reference = models
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(model)
    ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(3):
        reference_window(reference, _loss, step, accumulate=2)
        sharded_window(engine, model, _loss, step, accumulate=2)
        assert assert_close(gradients(model), gradients(reference), GRADIENTS) == 2
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(engine, model, reference)


def _hidden_states(stage: int) -> None:
    """Distillation of hidden states: the loss uses inner layers' outputs."""

    def loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        out = model(input_ids=tokens(step, micro, rank), output_hidden_states=True)
        assert len(out.hidden_states) == 3
        total = sum(state.square().mean() for state in out.hidden_states[:-1])
        return total + out.logits.square().mean()  # type: ignore[return-value]

    model, reference = _llama(), _llama()
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(model)
    for step in range(2):
        reference_window(reference, loss, step, accumulate=2)
        sharded_window(engine, model, loss, step, accumulate=2)
        assert_close(gradients(model), gradients(reference), GRADIENTS)


def _router_logits(stage: int) -> None:
    """transformers collects router logits by hooks, and adds their loss at the end."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def build() -> nn.Module:
        torch.manual_seed(7)
        config = MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
            max_position_embeddings=64,
        )
        model: nn.Module = MixtralForCausalLM(config)
        return model

    model, reference = build(), build()
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(model)
    for step in range(2):
        expected = reference_window(reference, _loss, step, accumulate=2)
        found = sharded_window(engine, model, _loss, step, accumulate=2)
        assert found == pytest.approx(expected.item(), rel=1e-5)
        assert_close(gradients(model), gradients(reference), GRADIENTS)


def _generation(stage: int) -> None:
    """Tokens equal one process; prompts and lengths differ between ranks; training goes on."""
    model, reference = _llama(), _llama()
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(model)
    prompt = tokens(3, 0, engine.rank, batch=1, length=4 + engine.rank)
    options = {"max_new_tokens": 1 + 5 * engine.rank, "do_sample": False, "eos_token_id": None}
    expected = reference.generate(prompt, **options)
    model.eval()
    with torch.no_grad(), engine.gathered():
        assert torch.equal(model.generate(prompt, **options), expected)
    model.train()
    assert_sharded(model)
    _train(engine, model, reference, 2)


def _from_meta(stage: int, tied: bool) -> None:
    """Every rank's memory is full of NaN before; all buffers equal a build on the CPU."""
    poison = [torch.full((1 << k,), math.nan) for k in range(22)]
    del poison
    start = _llama(tied=tied)
    engine = ZeroEngine(ZeroConfig(stage=stage))
    model = engine.shard(_llama(tied=tied, device="meta"))
    buffers = dict(model.named_buffers())
    assert "model.rotary_emb.inv_freq" in buffers
    for name, buffer in start.named_buffers():
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer), name
    filled = {name: whole(p) for name, p in model.named_parameters()}
    assert len(filled) == len(list(start.parameters()))
    for name, value in filled.items():
        expected = start.get_parameter(name)
        assert torch.isfinite(value).all() and value.std() == pytest.approx(
            expected.std().item(), rel=0.2, abs=1e-6
        ), name  # the initialisation of the model itself, with other random numbers
        copies = [torch.empty_like(value) for _ in range(engine.world_size)]
        dist.all_gather(copies, value)
        assert all(torch.equal(one, copies[0]) for one in copies)
    model.load_state_dict(
        {
            name: torch.distributed.tensor.distribute_tensor(
                value, model.get_parameter(name).device_mesh, model.get_parameter(name).placements
            )
            for name, value in start.state_dict().items()
        }
    )
    assert abs(_loss(model, 0, 0, engine.rank) - _loss(start, 0, 0, engine.rank)) < 1e-6
    model.zero_grad()
    _train(engine, model, start, 2)


class _NoReset(nn.Module):
    """Has a parameter of its own, and nothing that could initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 4)."""
        return x * self.gain


class _PartReset(_NoReset):
    """Initialises its parameter, and forgets its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        """Set the parameter only."""
        nn.init.ones_(self.gain)


class _IntTable(_NoReset):
    """Forgets an integer buffer, in which no NaN can mark what was left out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(5))

    def reset_parameters(self) -> None:
        """Set the parameter only."""
        nn.init.ones_(self.gain)


class _FlagTable(_NoReset):
    """Forgets a buffer of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False]))

    def reset_parameters(self) -> None:
        """Set the parameter only."""
        nn.init.ones_(self.gain)


class _Resets(_NoReset):
    """Sets all it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("off", torch.tensor([False, False]))
        self.register_buffer("on", torch.tensor([True, True]))
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        """Set the parameter and the buffers."""
        nn.init.ones_(self.gain)
        self.off.fill_(False)
        self.on.fill_(True)
        self.waves.fill_(1)
        self.table.copy_(torch.arange(3.0))


def _custom_on_meta(stage: int) -> None:
    engine = ZeroEngine(ZeroConfig(stage=stage))
    for kind in (_NoReset, _PartReset, _IntTable, _FlagTable):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), kind())
        with raises_everywhere(ModelError, f"1 ({kind.__name__})", "reset_parameters()"):
            engine.shard(model)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), _Resets())
    engine.shard(model)
    assert torch.equal(whole(model[2].gain), torch.ones(4))
    assert torch.equal(model[2].table, torch.arange(3.0))
    assert not model[2].off.any() and model[2].on.all() and (model[2].waves == 1).all()
    assert model[1].num_batches_tracked == 0 and torch.equal(model[1].running_var, torch.ones(4))
    model(torch.randn(3, 4)).sum().backward()
    part = nn.Linear(4, 4)  # the weight was loaded, the bias is still to be made
    loaded = nn.init.constant_(part.weight, 0.75).detach().clone()
    part.bias = nn.Parameter(torch.empty(4, device="meta"))
    engine.shard(part)
    assert torch.equal(whole(part.weight), loaded) and whole(part.bias).abs().max() <= 0.5


def _plain(stage: int) -> None:
    for tied in (False, True):
        _parity(stage, tied, None)
    _parity(stage, False, "engine")
    _parity(stage, True, "reentrant")
    _parity(stage, False, "not reentrant")
    _frozen_base_recomputed(stage)


def _special(stage: int) -> None:
    _hidden_states(stage)
    _router_logits(stage)
    _generation(stage)
    for tied in (False, True):
        _from_meta(stage, tied)
    _custom_on_meta(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_llama_trains_as_in_one_process(pool: RankPool, stage: int) -> None:
    """Cases 15, 68, 69: tied and untied, with layers recomputed in three ways."""
    pool.run(_plain, 2, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_llama_losses_generation_and_meta(pool: RankPool, stage: int) -> None:
    """Cases 43, 48, 71."""
    pool.run(_special, 2, stage)


def _copy_before(stage: int) -> None:
    policy = _llama()
    teacher = copy.deepcopy(policy)
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(policy)
    engine.shard(teacher)
    batch = tokens(0, 0, engine.rank)
    with torch.no_grad():
        torch.testing.assert_close(policy(batch).logits, teacher(batch).logits)


def test_llama_copied_before_sharding(pool: RankPool) -> None:
    """Case 74 on a Hugging Face model, at a world size that divides nothing."""
    pool.run(_copy_before, 3, 3)
