"""`rename`: the checkpoint's names on the left, the model's on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug.checkpoint import Reader, state_of_model, state_of_optimizer, write
from shardplug.checkpoint.read.renaming import Renaming
from shardplug.checkpoint.state.tensor_names import pair
from shardplug.errors import CheckpointError

NAMES = ("embed.weight", "blocks.0.up.weight", "blocks.0.up.bias", "blocks.10.up.weight", "scale")


def apply(rename: dict[str, str], names: tuple[str, ...] = NAMES) -> dict[str, str]:
    """The new names, by the checkpoint's."""
    manifest = {"models": [dict.fromkeys(names)], "optimizers": [dict.fromkeys(names)]}
    renaming, new = Renaming.of(Path("c"), manifest, rename)
    found = {renaming.saved(0, name): name for name in new["models"][0]}
    assert found == {renaming.saved_parameter(name): name for name in new["optimizers"][0]}
    assert list(found) == list(names)  # all are there, in their order
    return found


@pytest.mark.parametrize(
    ("rename", "changed"),
    [
        ({}, {}),
        ({"scale": "gain"}, {"scale": "gain"}),  # a tensor
        ({"scale": "scale"}, {}),
        ({"embed": "tokens"}, {"embed.weight": "tokens.weight"}),  # a module
        ({"blocks.0.up.bias": "b"}, {"blocks.0.up.bias": "b"}),
        (  # whole parts of a name: "blocks.1" is not the beginning of "blocks.10"
            {"blocks.10": "blocks.1"},
            {"blocks.10.up.weight": "blocks.1.up.weight"},
        ),
        (  # the longest name counts
            {"blocks": "layers", "blocks.0.up": "first"},
            {
                "blocks.0.up.weight": "first.weight",
                "blocks.0.up.bias": "first.bias",
                "blocks.10.up.weight": "layers.10.up.weight",
            },
        ),
        ({"": "model"}, {name: f"model.{name}" for name in NAMES}),
    ],
)
def test_tensors_and_modules_get_their_names(
    rename: dict[str, str], changed: dict[str, str]
) -> None:
    assert apply(rename) == {name: changed.get(name, name) for name in NAMES}


def test_names_can_change_places_and_lose_their_front() -> None:
    assert apply({"a": "b", "b": "a"}, ("a.w", "b.w")) == {"a.w": "b.w", "b.w": "a.w"}
    both = ("student.w", "student.v", "teacher.w")
    assert apply({"student": ""}, both) == {"student.w": "w", "student.v": "v", both[2]: both[2]}


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"embed": "blocks.0.up"}, "embed.weight and blocks.0.up.weight would both be blocks.0."),
        ({"embed.weight": "scale"}, "embed.weight and scale would both be scale"),
        ({"": "m", "scale": "m.embed.weight"}, "both be m.embed.weight"),
        ({"scale": ""}, "leave scale a name"),
        ({"head": "x"}, "tensors or modules of c, but it has no head."),
        ({"block.0": "x"}, r"no block.0 \(did you mean blocks.0\?\)"),
        ({"0.up.bias": "x"}, r"no 0.up.bias \(did you mean blocks.0.up.bias\?\)"),
        ({"embed": "e", "embed.weigth": "w"}, "embed.weigth .did you mean embed.weight"),
        ({"embed.weight": "e", "embed": "f"}, "has no embed"),  # nothing is left for it
    ],
)
def test_clashes_and_unknown_names_are_refused(rename: dict[str, str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        apply(rename)


def test_chosen_names_fit_beside_a_prefix() -> None:
    own = {name: {name} for name in ("tokens.weight", "norm.weight", "norm.bias")}
    theirs = ["tokens.weight", "model.norm.weight", "model.norm.bias"]
    assert pair(own, theirs).missing == ("norm.weight", "norm.bias")  # not taken for a prefix
    found = pair(own, theirs, given=["tokens.weight"])
    assert found.saved == dict(zip(own, theirs, strict=True)) and not found.unexpected
    # Chosen with the prefix, as the checkpoint has it.
    theirs[0] = "model.tokens.weight"
    assert pair(own, theirs, given=[theirs[0]]).saved == dict(zip(own, theirs, strict=True))
    # One tensor of the checkpoint is never given to two.
    own = {name: {name} for name in ("tokens", "model.tokens", "model.a", "model.b")}
    found = pair(own, ["tokens", "a", "b"], given=["tokens"])
    assert found.saved == {"tokens": "tokens", "model.a": "a", "model.b": "b"}
    assert found.missing == ("model.tokens",)


class Old(nn.Module):
    """What was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.stack = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


class New(nn.Module):
    """The same with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.body = nn.ModuleDict({"in": nn.Linear(4, 4), "out": nn.Linear(4, 2)})


MAP = {"first": "stem", "stack.0": "body.in", "stack.1": "body.out"}


def save(path: Path, model: nn.Module, front: str = "") -> Any:
    """Save a model with moments, its names behind `front`."""
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.ndim == d], "lr": d / 8} for d in (1, 2)]
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = state_of_optimizer(model, optimizer)
    for group in state["param_groups"]:
        group["params"] = [front + name for name in group["params"]]
    state["state"] = {front + name: values for name, values in state["state"].items()}
    tensors = {front + name: tensor for name, tensor in state_of_model(model).items()}
    write(path, models=[tensors], optimizers=[state], meta={})
    return optimizer


@pytest.mark.parametrize("front", ["", "model."])
@pytest.mark.parametrize("front_of_new", ["", "model."])
def test_optimizer_state_follows_also_behind_a_prefix(
    tmp_path: Path, front: str, front_of_new: str
) -> None:
    old, new = Old(), New()
    saved = save(tmp_path / "c", old, front)
    target = torch.optim.AdamW(
        [{"params": [p for p in new.parameters() if p.ndim == d], "lr": 9.0} for d in (1, 2)]
    )
    rename = {front + name: front_of_new + to for name, to in MAP.items()}
    reader = Reader(tmp_path / "c", rename=rename)
    assert reader.load(new, [target]) == [([], [])]
    pairs = list(zip(old.parameters(), new.parameters(), strict=True))
    assert len(pairs) == 6
    for theirs, ours in pairs:
        assert torch.equal(theirs, ours)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(saved.state[theirs][key], target.state[ours][key])
    assert [group["lr"] for group in target.param_groups] == [1 / 8, 2 / 8]
    # The steps that adapters take.
    read = reader.model_state(0, new)
    assert read.keys() == dict(new.named_parameters()).keys()
    state = reader.optimizer_state(0, new, target)
    assert state["state"].keys() == read.keys()
    assert state["param_groups"][0]["params"] == ["stem.bias", "body.in.bias", "body.out.bias"]


def test_a_tensor_of_another_shape_is_renamed_away(tmp_path: Path) -> None:
    class Wider(Old):
        def __init__(self) -> None:
            super().__init__()
            self.stack[1] = nn.Linear(4, 5)

    save(tmp_path / "c", Old())
    wider = Wider()
    own = wider.stack[1].weight.detach().clone()
    optimizer = torch.optim.AdamW([{"params": [p for p in wider.parameters() if p.ndim == d]}
                                   for d in (1, 2)])  # fmt: skip
    with pytest.raises(CheckpointError, match=r"stack.1.weight: \(2, 4\).*rename={"):
        Reader(tmp_path / "c").load(wider, strict=False)
    reader = Reader(tmp_path / "c", rename={"stack.1": "unused"})
    with (
        pytest.warns(UserWarning, match="Not in the model, and left out: unused.weight"),
        pytest.warns(UserWarning, match="optimizer state for unused.bias, unused.weight"),
    ):
        found = reader.load(wider, [optimizer], strict=False)
    assert found == [(["stack.1.weight", "stack.1.bias"], ["unused.weight", "unused.bias"])]
    assert torch.equal(wider.stack[1].weight, own)
    assert wider.stack[1].weight not in optimizer.state and wider.first.weight in optimizer.state


def test_a_part_of_a_checkpoint_becomes_the_model(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Old(), Old()

    both, alone = Both(), Old()
    save(tmp_path / "c", both)
    with pytest.raises(CheckpointError, match="no name is the same"):
        Reader(tmp_path / "c").load(alone, strict=False)
    with pytest.warns(UserWarning, match="left out: teacher.first.weight"):
        Reader(tmp_path / "c", rename={"student": ""}).load(alone, strict=False)
    pairs = list(zip(both.student.parameters(), alone.parameters(), strict=True))
    assert len(pairs) == 6 and all(torch.equal(a, b) for a, b in pairs)
