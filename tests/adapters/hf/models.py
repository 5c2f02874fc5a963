"""Small Hugging Face models on disk, and what is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB = 257


def llama_config(**options: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "pad_token_id": 0,
    }
    return LlamaConfig(**{**sizes, **options})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and reports out of the output."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield


def save_llama(
    folder: Path,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "5GB",
    seed: int = 3,
) -> Path:
    """Write a tiny Llama as save_pretrained does; biases and norms get values of their own."""
    torch.manual_seed(seed)
    with quiet():
        model = LlamaForCausalLM(llama_config(tie_word_embeddings=tied))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.generation_config.temperature = 0.7
        model.generation_config.do_sample = True
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def theirs(folder: Path | str, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Load whole, with transformers."""
    with quiet():
        return kind.from_pretrained(folder, **options)


def tokens(seed: int, rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_equal(
    ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], *, cast: bool = False
) -> None:
    """Compare bit by bit; with `cast` after casting what is wanted to our dtype, which is wider."""
    assert ours and set(ours) == set(wanted), sorted(set(ours) ^ set(wanted))
    for name, value in wanted.items():
        assert cast or ours[name].dtype == value.dtype, (name, ours[name].dtype, value.dtype)
        assert torch.equal(ours[name], value.to(ours[name].dtype)), name


def assert_equal_buffers(ours: nn.Module, wanted: nn.Module) -> None:
    buffers = dict(wanted.named_buffers())
    assert buffers
    assert_equal(dict(ours.named_buffers()), buffers)
