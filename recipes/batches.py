"""From pairs of text to the batches of a run, the same in both recipes.

The contract that makes two runs comparable: `TrainingSet` lays out the whole run beforehand, one
row per example in the order of training. Rows `s * global_batch .. (s + 1) * global_batch` are
optimizer step `s`, on any number of ranks and in any framework that hands out consecutive rows
(Lightning deals them out one by one, Accelerate a micro-batch at a time; the set is the same).
Because a row knows its step, it can also carry `window_tokens`: how many tokens the whole step
trains on, over all ranks and micro-batches. That is what a token-weighted mean divides by, and it
needs no communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import torch
from text import RecipeError
from torch.utils.data import Dataset

IGNORE = -100
"""Label of a token that is not trained on: the prompt, and padding."""


def tokenise(
    pairs: datasets.Dataset, tokenizer: Any, seq_length: int, packing: bool = False
) -> datasets.Dataset:
    """Turns pairs into token rows whose prompt is not trained on.

    Args:
        pairs: Rows of `prompt` and `completion`.
        tokenizer: A Hugging Face tokenizer with a chat template.
        seq_length: Most tokens of a row; longer pairs are cut at the end.
        packing: Whether several pairs share a row. Their `position_ids` start at 0 again, from
            which the model sees that they must not attend to each other.

    Returns:
        Rows of `input_ids`, `labels` and `position_ids`, each of up to `seq_length`, and
        `num_labels`, the number of tokens trained on, at least 1.

    Raises:
        RecipeError: `seq_length` leaves no row with a token to train on.
    """
    rows = pairs.map(
        _encode,
        fn_kwargs={"tokenizer": tokenizer, "seq_length": seq_length},
        remove_columns=pairs.column_names,
    ).filter(lambda num_labels: num_labels > 0, input_columns="num_labels")
    if not len(rows):
        raise RecipeError(
            f"Expected --seq_length to leave room for the text after the prompt, got {seq_length} "
            f"tokens for {len(pairs)} rows; raise it."
        )
    return datasets.Dataset.from_list(_pack(rows, seq_length)) if packing else rows


def _encode(pair: Mapping[str, Any], tokenizer: Any, seq_length: int) -> dict[str, Any]:
    head: list[int] = []
    if pair["prompt"]:
        head_text = tokenizer.apply_chat_template(
            pair["prompt"], tokenize=False, add_generation_prompt=True
        )
        head = tokenizer.encode(head_text, add_special_tokens=False)
    body = tokenizer.encode(pair["completion"], add_special_tokens=False)
    input_ids = [*head, *body, tokenizer.eos_token_id][:seq_length]
    # Nothing comes before the first token to predict it from (in a packed row: another text).
    num_masked = min(max(len(head), 1), len(input_ids))
    return {
        "input_ids": input_ids,
        "labels": [IGNORE] * num_masked + input_ids[num_masked:],
        "position_ids": list(range(len(input_ids))),
        "num_labels": len(input_ids) - num_masked,
    }


def _pack(rows: datasets.Dataset, seq_length: int) -> list[dict[str, Any]]:
    """Fills rows one after the other; a pair that no longer fits starts the next row."""
    packed: list[dict[str, Any]] = []
    for row in rows:
        if packed and len(packed[-1]["input_ids"]) + len(row["input_ids"]) <= seq_length:
            packed[-1] = {name: packed[-1][name] + value for name, value in row.items()}
        else:
            packed.append(row)
    return packed


class TrainingSet(Dataset[dict[str, Any]]):
    """The rows of a whole run, to be read in order, shuffled anew for each pass over the text.

    Args:
        rows: What `tokenise` returned.
        steps: Optimizer steps of the run.
        global_batch: Rows per optimizer step: micro-batch times ranks times accumulation.
        seed: Seeds the order.
        first_step: Leave out the rows of the steps before this one.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        steps: int,
        global_batch: int,
        seed: int,
        first_step: int = 0,
    ) -> None:
        self.rows = rows
        self.global_batch = global_batch
        num_epochs = -(-steps * global_batch // len(rows))
        epochs = []
        for epoch in range(num_epochs):
            generator = torch.Generator().manual_seed(seed + epoch)
            epochs.append(torch.randperm(len(rows), generator=generator))
        self.order = torch.cat(epochs)[first_step * global_batch : steps * global_batch]
        num_labels = torch.tensor(rows["num_labels"])[self.order]
        self.window_tokens = num_labels.view(-1, global_batch).sum(dim=1).tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[int(self.order[index])]
        return {**row, "window_tokens": self.window_tokens[index // self.global_batch]}


def held_out_set(rows: datasets.Dataset, multiple: int) -> list[dict[str, Any]]:
    """Fills the rows up with empty ones, so that every rank runs the same number of batches.

    A sharded forward is collective: a rank with one batch less would leave the others waiting. A
    row repeated instead would count twice in the mean.

    Args:
        rows: What `tokenise` returned.
        multiple: Ranks times micro-batch.

    Returns:
        The rows, and up to `multiple - 1` rows without a label.
    """
    filled = [{**row, "window_tokens": row["num_labels"]} for row in rows]
    blank = {name: filled[0][name][:1] for name in ("input_ids", "position_ids")}
    blank |= {"labels": [IGNORE], "num_labels": 0, "window_tokens": 0}
    return filled + [blank] * (-len(filled) % multiple)


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Stacks rows into a batch, filled up at the right to the longest of them.

    No attention mask is needed: a causal model never looks right, and filling has no labels.
    Positions count on through the filling, because a restart would mean another packed text.

    Args:
        rows: Rows of a `TrainingSet` or of `held_out_set`.

    Returns:
        `input_ids`, `labels`, `position_ids` of shape (rows, width), and `window_tokens`, a scalar.
    """
    # In steps of 32 tokens: some CPU libraries keep a kernel for every shape that they have met.
    width = max(len(row["input_ids"]) for row in rows)
    width += -width % 32
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full_like(input_ids, IGNORE)
    position_ids = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids[index, :length] = torch.tensor(row["input_ids"])
        labels[index, :length] = torch.tensor(row["labels"])
        position_ids[index, :length] = torch.tensor(row["position_ids"])
        last = row["position_ids"][-1]
        position_ids[index, length:] = torch.arange(last + 1, last + 1 + width - length)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "window_tokens": torch.tensor(rows[0]["window_tokens"]),
    }
