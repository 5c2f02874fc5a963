"""Models that break other integrations: Hugging Face Llama, ties, scalars, freezing, attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from shardplug import ConfigError
from tests.adapters.accelerate.common import (
    WORLD,
    accelerator,
    largest_difference,
    loader,
    seeded_model,
)
from tests.support.models import VOCAB, lm_loss, tokens
from tests.support.pool import RankPool


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(21)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def labels_loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return net(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def fused_loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Reads the head's weight without calling the head, as chunked losses do."""
    hidden = net.model(input_ids=batch).last_hidden_state
    logits = F.linear(hidden, whole(net.lm_head.weight))
    return lm_loss(logits, batch)


def whole(weight: Any) -> torch.Tensor:
    return weight


class WithFusedLoss(nn.Module):
    """A model whose forward uses the head's weight directly."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch: (b, s) -> the loss."""
        return fused_loss(self.net, batch)


class Encoder(nn.Module):
    """torch's own attention, whose out_proj weight is read by its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, VOCAB)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch: (b, s) -> the loss."""
        return lm_loss(self.head(self.encoder(self.embed(batch))), batch)


def encoder() -> nn.Module:
    torch.manual_seed(4)
    return Encoder()


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], torch.Tensor]]


def call(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return net(batch)  # type: ignore[no-any-return]


def untied_llama() -> nn.Module:
    return llama(False)


def tied_llama() -> nn.Module:
    return llama(True)


def recomputing_llama(reentrant: bool) -> nn.Module:
    net = llama(False)
    net.activation_checkpointing_enable(  # type: ignore[operator]
        activation_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    return net


def llama_recomputing() -> nn.Module:
    return recomputing_llama(False)


def llama_recomputing_reentrantly() -> nn.Module:
    return recomputing_llama(True)


def llama_with_fused_loss() -> nn.Module:
    return WithFusedLoss(llama(True))


CASES: dict[str, Case] = {
    "llama": (untied_llama, labels_loss),
    "tied llama": (tied_llama, labels_loss),
    "recomputing": (llama_recomputing, labels_loss),
    "recomputing reentrantly": (llama_recomputing_reentrantly, labels_loss),
    "weight read directly": (llama_with_fused_loss, call),
    "torch attention": (encoder, call),
}


def train_case(name: str, stage: int, checkpointing: bool) -> Any:
    build, compute_loss = CASES[name]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=checkpointing, state_dict_type="FULL_STATE_DICT"
    )
    acc = accelerator(zero=f"zero{stage}", cpu=True, fsdp_plugin=plugin)
    assert acc.zero_config.activation_checkpointing == checkpointing
    net = build()
    # SGD: AdamW divides the attention's key bias gradient, which is nothing but rounding.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer = acc.prepare(net, optimizer)
    losses, norms = [], []
    for step in range(5):
        loss = compute_loss(net, tokens(step, 0, dist.get_rank()))
        acc.backward(loss)
        norms.append(acc.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(acc.reduce(loss.detach(), "mean").item())
    net.eval()
    with torch.no_grad():
        evaluated = compute_loss(net, tokens(9, 0, dist.get_rank())).item()
    return losses, norms, acc.get_state_dict(net), evaluated


@pytest.mark.parametrize(
    ("name", "stage", "checkpointing"),
    [
        ("llama", 1, False),
        ("llama", 2, True),
        ("llama", 3, True),
        ("tied llama", 3, False),
        ("recomputing", 3, False),
        ("recomputing reentrantly", 2, False),
        ("recomputing reentrantly", 3, False),
        ("weight read directly", 3, False),
        ("torch attention", 3, False),
    ],
)
def test_model_equals_one_process(
    pool: RankPool, name: str, stage: int, checkpointing: bool
) -> None:
    ranks = pool.run(train_case, WORLD, name, stage, checkpointing)
    build, compute_loss = CASES[name]
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(5):
        batch = torch.cat([tokens(step, 0, rank) for rank in range(WORLD)])
        loss = compute_loss(net, batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    net.eval()
    for rank, (our_losses, our_norms, _, evaluated) in enumerate(ranks):
        assert our_losses == pytest.approx(losses, rel=1e-5)
        assert our_norms == pytest.approx(norms, rel=1e-6)
        with torch.no_grad():
            expected = compute_loss(net, tokens(9, 0, rank)).item()
        assert evaluated == pytest.approx(expected, rel=1e-5)
    assert largest_difference(ranks[0][2], net.state_dict()) <= 2e-6


def freeze_and_thaw() -> dict[str, torch.Tensor]:
    acc = accelerator(zero="zero3")
    net = seeded_model()
    net, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for phase, frozen in enumerate((True, False, True)):
        net.embed.requires_grad_(not frozen)
        kept = net.embed.weight.full_tensor().clone()
        for step in range(3):
            batch = tokens(step, phase, dist.get_rank())
            acc.backward(lm_loss(net(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(kept, net.embed.weight.full_tensor()) == frozen
    return acc.get_state_dict(net)


def test_freezing_and_thawing_during_training(pool: RankPool) -> None:
    ours = pool.run(freeze_and_thaw, WORLD)[0]
    net = seeded_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for phase, frozen in enumerate((True, False, True)):
        net.embed.requires_grad_(not frozen)
        for step in range(3):
            batch = torch.cat([tokens(step, phase, rank) for rank in range(WORLD)])
            lm_loss(net(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(ours, net.state_dict()) <= 2e-6


def reference_log_probabilities() -> tuple[torch.Tensor, bool]:
    """The policy's copy, made before prepare, gives the log-probabilities of the start."""
    acc = accelerator(zero="zero2")
    policy = llama(True)
    reference = copy.deepcopy(policy)
    policy, optimizer = acc.prepare(policy, torch.optim.AdamW(policy.parameters(), lr=1e-2))
    reference = acc.prepare_model(reference, evaluation_mode=True)
    batch = tokens(0, 0, dist.get_rank())
    for _ in range(2):
        with torch.no_grad():
            logits = reference(input_ids=batch).logits
        acc.backward(F.kl_div(policy(input_ids=batch).logits.log_softmax(-1), logits.softmax(-1)))
        optimizer.step()
        optimizer.zero_grad()
    acc.backward(labels_loss(policy, batch))
    optimizer.step()
    with torch.no_grad():
        moved = not torch.allclose(policy(input_ids=batch).logits, logits)
    return logits.log_softmax(-1), moved


def test_reference_copy_for_preference_training(pool: RankPool) -> None:
    for rank, (ours, moved) in enumerate(pool.run(reference_log_probabilities, WORLD)):
        with torch.no_grad():
            theirs = llama(True)(input_ids=tokens(0, 0, rank)).logits.log_softmax(-1)
        assert torch.allclose(ours, theirs, atol=1e-5)
        assert moved


def export_and_reload(folder: str) -> bool:
    """`unwrap_model(...).save_pretrained` with our state dict, the Hugging Face idiom."""
    acc = accelerator(zero="zero3", mixed_precision="bf16")
    net = acc.prepare(llama(True))
    acc.unwrap_model(net).save_pretrained(
        folder,
        is_main_process=acc.is_main_process,
        save_function=acc.save,
        state_dict=acc.get_state_dict(net),
    )
    acc.wait_for_everyone()
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(folder)
    expected = llama(True).state_dict()
    found = again.state_dict()
    assert type(again).__name__ == "LlamaForCausalLM" and found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_save_pretrained_idiom(pool: RankPool, tmp_path: Any) -> None:
    assert pool.run(export_and_reload, WORLD, str(tmp_path / "model")) == [True, True]


# -- data ----------------------------------------------------------------------------------------


class Stream(IterableDataset[torch.Tensor]):
    """Rows that have no length."""

    def __iter__(self) -> Any:
        """Yield 20 rows."""
        for index in range(20):
            yield tokens(index, 0, 0)[0]


def stream_windows() -> tuple[list[int], int]:
    acc = accelerator(zero="zero2", gradient_accumulation_steps=2)
    net = seeded_model()
    net, optimizer, batches = acc.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader(Stream())
    )
    first_tokens, steps = [], 0
    for batch in batches:  # read on rank 0 and dealt out; 5 batches a rank: the last window is 1
        with acc.accumulate(net):
            acc.backward(lm_loss(net(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
            steps += acc.sync_gradients
        first_tokens.append(int(batch[0, 0]))
    return first_tokens, steps


def test_streams_are_dealt_out_and_the_last_window_is_short(pool: RankPool) -> None:
    ranks = pool.run(stream_windows, WORLD)
    rows = [int(row[0]) for row in Stream()]
    for rank, (first_tokens, steps) in enumerate(ranks):
        assert first_tokens == rows[2 * rank :: 4]
        assert steps == 3


def uneven_batches() -> None:
    acc = accelerator(
        zero="zero3",
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    with pytest.raises(ConfigError, match=r"got \[2, 1\] with even_batches=False"):
        acc.prepare(loader(torch.arange(6)))
    assert len(acc.prepare(loader(torch.arange(8)))) == 2
    with pytest.raises(ConfigError, match="every rank"), acc.join_uneven_inputs([]):
        pass


def test_uneven_loaders_are_refused(pool: RankPool) -> None:
    pool.run(uneven_batches, WORLD)


def two_trainings() -> list[bool]:
    """free_memory between two trainings, and an evaluation before the optimizer exists."""
    import gc
    import weakref

    acc = accelerator(zero="zero3")
    net = seeded_model()
    net = acc.prepare(net)
    batch = tokens(0, 0, dist.get_rank())
    with torch.no_grad():
        before = lm_loss(net(batch), batch).item()
    acc.free_memory()
    net, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    loss = lm_loss(net(batch), batch)
    acc.backward(loss)
    optimizer.step()
    with torch.no_grad():
        after = lm_loss(net(batch), batch).item()
    gone = weakref.ref(net)
    net, optimizer = acc.free_memory(net, optimizer)
    del loss
    gc.collect()
    other = acc.prepare(nn.Linear(3, 2))
    return [after < before, gone() is None, acc.engine.models == [other]]


def test_free_memory_lets_go_and_takes_back(pool: RankPool) -> None:
    assert pool.run(two_trainings, WORLD) == [[True] * 3] * WORLD


def module_without_parameters() -> bool:
    acc = accelerator(zero="zero3")
    net, criterion = acc.prepare(nn.Linear(4, 2), nn.CrossEntropyLoss())
    acc.backward(criterion(net(torch.ones(3, 4)), torch.tensor([0, 1, 0])))
    return net.weight.grad is not None


def test_a_loss_module_may_be_prepared(pool: RankPool) -> None:
    assert pool.run(module_without_parameters, WORLD) == [True, True]
