"""The recipes' batches: masking, packing, the order of a run, and the weight of a token."""

from __future__ import annotations

import batches
import datasets
import llama
import pytest
import text
import torch
from torch import nn
from torch.utils.data import DataLoader

SEQ_LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer():
    return llama.load_tokenizer(llama.find("tiny"))


@pytest.fixture(scope="module")
def pairs() -> datasets.Dataset:
    return text.load_pairs("docstrings")


@pytest.fixture(scope="module")
def rows(pairs, tokenizer) -> datasets.Dataset:
    return batches.tokenise(pairs.select(range(100)), tokenizer, SEQ_LENGTH)


def test_labels_are_masked_on_the_prompt_and_nowhere_else(rows, tokenizer, pairs):
    for row, pair in zip(rows, pairs, strict=False):
        trained = [label for label in row["labels"] if label != batches.IGNORE]
        prompt = row["input_ids"][: len(row["labels"]) - len(trained)]
        assert len(trained) == row["num_labels"] >= 1
        assert row["labels"] == [batches.IGNORE] * len(prompt) + trained
        assert row["input_ids"] == prompt + trained
        question = pair["prompt"][0]["content"]
        assert tokenizer.decode(prompt) == f"<|user|>\n{question}\n<|assistant|>\n"
        answer = tokenizer.decode(trained, skip_special_tokens=True)
        assert pair["completion"].startswith(answer)
        cut = len(row["input_ids"]) == SEQ_LENGTH
        assert cut or trained[-1] == tokenizer.eos_token_id


def test_first_token_of_plain_text_is_not_trained_on(tokenizer):
    plain = datasets.Dataset.from_list([{"prompt": [], "completion": "Nothing comes before me."}])
    (row,) = batches.tokenise(plain, tokenizer, SEQ_LENGTH)
    assert row["labels"][0] == batches.IGNORE
    assert row["labels"][1:] == row["input_ids"][1:]


def test_rows_without_room_for_an_answer_are_left_out_or_refused(pairs, tokenizer):
    with pytest.raises(text.RecipeError, match="Expected --seq_length to leave room.* got 4 tok"):
        batches.tokenise(pairs.select(range(10)), tokenizer, 4)


def test_packed_rows_give_the_loss_of_the_texts_apart(rows, pairs, tokenizer):
    packed = batches.tokenise(pairs.select(range(100)), tokenizer, 2 * SEQ_LENGTH, packing=True)
    whole = batches.tokenise(pairs.select(range(100)), tokenizer, 2 * SEQ_LENGTH)
    assert len(packed) < len(whole)
    assert sum(packed["num_labels"]) == sum(whole["num_labels"])
    source = llama.find("tiny")
    model = llama.load_model(source, tokenizer, seed=0).eval()
    (row, *_) = [row for row in packed if row["position_ids"].count(0) >= 2]
    parts = [r for r in whole if r["input_ids"][:40] in _windows(row["input_ids"], 40)]
    assert len(parts) == row["position_ids"].count(0)
    with torch.no_grad():
        together = llama.nll_sum(model, _batch([row]))
        apart = sum(llama.nll_sum(model, _batch([part])) for part in parts)
        # The same through a padded batch, where rows of other lengths stand beside it.
        padded = llama.nll_sum(model, _batch(parts))
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=0)
    torch.testing.assert_close(padded, apart, rtol=1e-6, atol=0)


def _windows(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(len(ids))]


def _batch(rows) -> dict[str, torch.Tensor]:
    return batches.collate([{**row, "window_tokens": 1} for row in rows])


def test_steps_hold_the_same_rows_for_any_number_of_ranks(rows):
    run = batches.TrainingSet(rows, steps=30, global_batch=8, seed=3)
    assert len(run) == 240 > len(rows)  # goes over the text more than twice
    for step in range(30):
        items = [run[index] for index in range(8 * step, 8 * step + 8)]
        assert {item["window_tokens"] for item in items} == {sum(i["num_labels"] for i in items)}
    again = batches.TrainingSet(rows, steps=30, global_batch=8, seed=3)
    other = batches.TrainingSet(rows, steps=30, global_batch=8, seed=4)
    assert again.order.equal(run.order)
    assert not other.order.equal(run.order)
    later = batches.TrainingSet(rows, steps=30, global_batch=8, seed=3, first_step=20)
    assert [later[index] for index in range(80)] == [run[index] for index in range(160, 240)]
    num_rows = len(rows)
    first, second = run.order[:num_rows], run.order[num_rows : 2 * num_rows]
    assert first.sort().values.equal(torch.arange(num_rows))
    assert second.sort().values.equal(torch.arange(num_rows))
    assert not first.equal(second)


def test_losses_of_micro_batches_sum_to_the_mean_over_the_tokens_of_the_step(rows, tokenizer):
    model = llama.load_model(llama.find("tiny"), tokenizer, seed=0).eval()
    run = batches.TrainingSet(rows, steps=1, global_batch=8, seed=0)
    with torch.no_grad():
        shares = [
            llama.nll_sum(model, batch) / batch["window_tokens"]
            for batch in DataLoader(run, batch_size=2, collate_fn=batches.collate)
        ]
        (whole,) = DataLoader(run, batch_size=8, collate_fn=batches.collate)
        logits = model(input_ids=whole["input_ids"]).logits[:, :-1].transpose(1, 2)
        mean = nn.functional.cross_entropy(logits, whole["labels"][:, 1:], ignore_index=-100)
    assert len(shares) == 4
    torch.testing.assert_close(sum(shares), mean, rtol=1e-6, atol=0)


def test_held_out_rows_are_filled_up_with_rows_that_do_not_count(rows):
    filled = batches.held_out_set(rows.select(range(9)), multiple=4)
    assert len(filled) == 12
    assert [row["num_labels"] for row in filled[9:]] == [0, 0, 0]
    assert (batches.collate(filled[8:])["labels"][1:] == batches.IGNORE).all()
