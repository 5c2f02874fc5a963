"""What is loaded into what: prefixes, ties, several models, extra state."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import (
    Reader,
    load_model,
    load_optimizer,
    state_of_model,
    state_of_optimizer,
    write,
)
from shardplug.errors import CheckpointError
from tests.dist.checkpoint_runs import (
    assert_equal,
    make_run,
    refused,
    sharded,
    snapshot,
    train,
)
from tests.support.models import TinyLM
from tests.support.pool import RankPool


class Wrapper(nn.Module):
    """Puts "model." in front of all names, as a LightningModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyLM(tied=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (b, s) -> logits (b, s, VOCAB)."""
        return self.model(ids)


def _without_front(found: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(" model.", " "): value for key, value in found.items()}


def _prefixes(root: str) -> None:
    wrapped = sharded(Wrapper(), 1)
    train(wrapped, range(2))
    bare = sharded(TinyLM(tied=True), 3)
    train(bare, range(1))
    runs = {"wrapped": wrapped, "bare": bare}
    expected = {}
    for name, run in runs.items():
        run.engine.save(f"{root}/{name}", optimizers=[run.optimizer])
        expected[name] = _without_front(snapshot(run.model, run.optimizer))
    assert "model.embed.weight" in Reader(f"{root}/wrapped").manifest["models"][0]
    assert "model.head.weight" not in Reader(f"{root}/wrapped").manifest["models"][0]
    for source, target in (("wrapped", "bare"), ("bare", "wrapped")):
        new = sharded(Wrapper() if target == "wrapped" else TinyLM(tied=True), 2)
        new.engine.load(f"{root}/{source}", optimizers=[new.optimizer])
        assert_equal(expected[source], _without_front(snapshot(new.model, new.optimizer)))
        # The two steps that adapters take by themselves.
        again = sharded(Wrapper() if target == "wrapped" else TinyLM(tied=True), 3)
        reader = Reader(f"{root}/{source}")
        load_model(again.model, reader.model_state(0, again.model))
        everything = reader.optimizer_state(0, again.engine)
        for_this = reader.optimizer_state(0, again.engine, again.optimizer)
        assert everything["state"].keys() == for_this["state"].keys()
        assert len(everything["state"]) > 10
        load_optimizer(again.engine, again.optimizer, everything)
        assert_equal(expected[source], _without_front(snapshot(again.model, again.optimizer)))
        train(again, range(2, 4))

    # Whole tensors under either name of a tied tensor, with and without the prefix.
    whole = bare.engine.full_state_dict(rank0_only=False)
    for drop in ("embed.weight", "head.weight", None):
        state = {k: v for k, v in whole.items() if k != drop}
        for target in (TinyLM(tied=True), Wrapper()):
            run = sharded(target)
            assert load_model(run.model, state) == ([], [])
            found = _without_front(snapshot(run.model))
            assert torch.equal(found["weight embed.weight"], whole["embed.weight"])
            assert torch.equal(found["weight blocks.1.up.bias"], whole["blocks.1.up.bias"])

    # Tied here, two tensors there, and the other way round: not taken for the same.
    untied = sharded(TinyLM())
    untied.engine.save(f"{root}/untied", optimizers=[untied.optimizer])
    refused(bare, f"{root}/untied", "Not in the model: head.weight")
    refused(untied, f"{root}/bare", "Missing in the checkpoint: head.weight")


def _several(root: str) -> None:
    """Two models and three optimizers, one of them over both models."""

    def build(seed: int) -> tuple[ZeroEngine, list[nn.Module], list[torch.optim.Optimizer]]:
        engine = ZeroEngine(ZeroConfig(stage=2))
        torch.manual_seed(seed)
        models = [engine.shard(TinyLM()), engine.shard(TinyLM(width=10, hidden=21, tied=True))]
        first, second = models
        optimizers = [
            torch.optim.AdamW(first.blocks.parameters(), 1e-3),
            torch.optim.SGD(second.blocks.parameters(), 0.1, momentum=0.9),
            torch.optim.AdamW([first.scale, second.scale, *second.norm.parameters()], 1e-2),
        ]
        return engine, models, [engine.prepare_optimizer(o) for o in optimizers]

    def go(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], steps: Any) -> None:
        for step in steps:
            for model in models:
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                ids = torch.randint(0, 257, (2, 5), generator=generator)
                model(ids).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for model in models:
                model.zero_grad()

    def shot(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Any:
        found = {}
        owned = {id(p): i for i, m in enumerate(models) for p in m.parameters()}
        for index, model in enumerate(models):
            found.update({f"{index} {k}": v for k, v in snapshot(model).items()})
        for number, optimizer in enumerate(optimizers):
            for position, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
                for key, value in optimizer.state[p].items():
                    full = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
                    found[f"optimizer {number} {position} {owned[id(p)]} {key}"] = full
        return found

    engine, models, optimizers = build(1)
    go(models, optimizers, range(2))
    engine.save(f"{root}/several", optimizers=optimizers)
    saved = shot(models, optimizers)
    assert any(key.startswith("optimizer 2 1 1 ") for key in saved)
    go(models, optimizers, range(2, 4))

    engine2, models2, optimizers2 = build(99)
    engine2.load(f"{root}/several", optimizers=optimizers2)
    assert_equal(saved, shot(models2, optimizers2))
    go(models2, optimizers2, range(2, 4))
    assert_equal(shot(models, optimizers), shot(models2, optimizers2))

    one = sharded(TinyLM())
    with (
        pytest.warns(UserWarning, match="2 models and 1 are loaded")
        if (dist.get_rank() == 0)
        else warnings.catch_warnings()
    ):
        one.engine.load(f"{root}/several")
    assert torch.equal(snapshot(one.model)["weight norm.bias"], saved["0 weight norm.bias"])
    with pytest.raises(CheckpointError, match="4 or more optimizers, but it has that of 3"):
        Reader(f"{root}/several").optimizer_state(3, one.engine)
    with pytest.raises(CheckpointError, match="to hold model 2, but it has 2"):
        Reader(f"{root}/several").model_state(2, one.model)

    # A second entry for the same model with some of its names, as an average of weights has.
    part = {k: v * 2 for k, v in state_of_model(one.model).items() if k.startswith("blocks.1")}
    write(f"{root}/average", models=[state_of_model(one.model), part], optimizers=[], meta={})
    read = Reader(f"{root}/average").model_state(1, one.model, strict=False, warn=False)
    assert read.keys() == part.keys() and len(part) == 5
    for name, value in part.items():
        assert torch.equal(value.full_tensor(), read[name].full_tensor())


class Counting(nn.Module):
    """Keeps a list and a tensor through `get_extra_state`, and integer buffers."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3))
        self.state = state
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (n, 7) -> (n, 3)."""
        return x @ self.weight


class Checkpointed(nn.Sequential):
    """Counting modules; a checkpoint wrapper adds to the names of some."""

    @classmethod
    def build(cls, state: Any) -> Checkpointed:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        return cls(checkpoint_wrapper(Counting(state)), nn.Linear(3, 7), Counting(b"raw"))


def _extra_state(root: str) -> None:
    value = {"seen": [1, 2, 3], "amax": torch.arange(4.0), "name": "x", "none": None}
    run = sharded(Checkpointed.build(value))
    run.model[2].count.fill_(41)
    run.model[2].mask[dist.get_rank()] = True  # ranks may differ: rank 0's counts
    run.engine.save(f"{root}/extra", optimizers=[run.optimizer])
    assert "0._extra_state" in Reader(f"{root}/extra").manifest["models"][0]

    plain = Checkpointed.build(None)
    for target in (sharded(Checkpointed.build(None)).model, plain):
        assert Reader(f"{root}/extra").load(target) == [([], [])]
        inner, last = target[0]._checkpoint_wrapped_module, target[2]
        assert inner.state["seen"] == [1, 2, 3] and inner.state["none"] is None
        assert torch.equal(inner.state["amax"], torch.arange(4.0))
        assert last.state == b"raw" and int(last.count) == 41
        assert last.mask.tolist() == [True, False, False, False, False]
    again = sharded(Checkpointed.build(object()))  # what is there before does not matter
    load_model(again.model, Reader(f"{root}/extra").model_state(0, again.model))
    assert again.model[2].state == b"raw"
    load_model(again.model, Checkpointed.build("from a plain state dict").state_dict())
    assert again.model[0]._checkpoint_wrapped_module.state == "from a plain state dict"

    if dist.get_rank() == 0:  # whole, on one rank alone
        unsharded = nn.Sequential(Counting(), nn.Linear(3, 7), Counting())
        whole = Reader(f"{root}/extra", alone=True).whole_state()
        unsharded.load_state_dict(whole)
        assert unsharded[2].state == b"raw" and unsharded[0].state["seen"] == [1, 2, 3]
        assert torch.equal(unsharded[0].weight, plain[0]._checkpoint_wrapped_module.weight)
    dist.barrier()

    drifted = sharded(nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(6))))
    for buffer in drifted.model.buffers():
        buffer.fill_(dist.get_rank() + 1)
    drifted.engine.save(f"{root}/drifted")
    drifted.engine.load(f"{root}/drifted")
    buffers = list(drifted.model.buffers())  # all of one rank, not some of each
    assert len(buffers) == 18 and all(buffer.eq(1).all() for buffer in buffers)

    tensor = sharded(nn.Sequential(Counting(torch.tensor([1, 2], dtype=torch.uint8))))
    tensor.engine.save(f"{root}/tensor", optimizers=[tensor.optimizer])
    tensor.model[0].state = None
    tensor.engine.load(f"{root}/tensor", optimizers=[tensor.optimizer])
    assert tensor.model[0].state.tolist() == [1, 2]

    # As many bytes on every rank or not; of one module, the other has the same on all ranks.
    own = {"seen": list(range(40 * dist.get_rank())), "amax": torch.full((3,), dist.get_rank())}
    nested = nn.Sequential(Counting("same"), nn.Sequential(nn.Linear(3, 7), Counting(own)))
    rows = sharded(nested)
    for kind in ("sync", "async"):
        rows.engine.save(f"{root}/ranks-{kind}", async_save=kind == "async")
        rows.model[1][1].state = None  # an async save has its copy already
        rows.engine.wait_for_save()
        assert "rank_bytes" in (entry := _entry(f"{root}/ranks-{kind}", "1.1._extra_state"))
        assert len(entry["rank_bytes"]) == 2 and entry["rank_bytes"][0] < entry["rank_bytes"][1]
        assert "rank_bytes" not in _entry(f"{root}/ranks-{kind}", "0._extra_state")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows.engine.load(f"{root}/ranks-{kind}")
        assert rows.model[1][1].state["seen"] == own["seen"] and rows.model[0].state == "same"
        assert rows.model[1][1].state["amax"].tolist() == [dist.get_rank()] * 3

    run.model[2].state = object()
    with pytest.raises(CheckpointError, match="extra state 2._extra_state"):
        run.engine.save(f"{root}/extra", optimizers=[run.optimizer])
    run.model[2].state = {"shard": [run.model[2].weight]}
    with pytest.raises(CheckpointError, match="DTensor"):
        run.engine.save(f"{root}/extra", optimizers=[run.optimizer])
    assert Reader(f"{root}/extra").manifest["world_size"] == 2  # the old one is untouched

    hooked = sharded(nn.Sequential(nn.Linear(3, 3)))
    hooked.model.register_state_dict_post_hook(
        lambda module, state, prefix, local: state.update(computed=torch.ones(1))
    )
    with pytest.raises(CheckpointError, match="computed"):
        hooked.engine.save(f"{root}/hooked")
    wrong = sharded(nn.Sequential(Counting(b"")))
    wrong.engine.save(f"{root}/wrong")
    wrong.model[0].count = wrong.model[0].count.float()
    with pytest.raises(CheckpointError, match=r"0.count: torch.int64 in the checkpoint"):
        wrong.engine.load(f"{root}/wrong")


def _entry(folder: str, name: str) -> Any:
    return Reader(folder).manifest["models"][0][name]


def _from_other_ranks(folder: str) -> None:
    """Every rank gets rank 0's extra state, and rank 0 says of which modules."""
    said = r"of 1\.1 differed between the 2 ranks.*rank 0's is used everywhere"
    plain = nn.Sequential(Counting(), nn.Sequential(nn.Linear(3, 7), Counting()))
    loads: list[Any] = [lambda: Reader(folder, alone=True).load(plain)]
    loads.append(lambda: plain.load_state_dict(Reader(folder, alone=True).whole_state()))
    if dist.get_world_size() != 2:
        again = sharded(nn.Sequential(Counting(), nn.Sequential(nn.Linear(3, 7), Counting())))
        loads.append(lambda: again.engine.load(folder))
        # The name of a module that has another one now.
        loads.append(lambda: again.engine.load(folder, rename={"0": "0"}))
    for number, load in enumerate(loads):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load()
        texts = [str(one.message) for one in caught if re.search(said, str(one.message))]
        assert len(texts) == (1 if number < 2 or dist.get_rank() == 0 else 0), (number, texts)
        for model in [plain, again.model] if number > 1 else [plain]:
            assert model[1][1].state["seen"] == [] and model[0].state == "same"


def _no_second_copy(root: str) -> None:
    """Loading writes into the shards that the model has, with one read of the folder."""
    from shardplug.checkpoint.read import reader as module
    from shardplug.checkpoint.read.load_plan import plan_model

    run = make_run("plain", 3)
    train(run, range(1))
    run.engine.save(f"{root}/c", optimizers=[run.optimizer])
    pointers = [p.data_ptr() for p in map(_local, run.model.parameters())]
    reader = Reader(f"{root}/c")
    targets = plan_model(reader.path, reader.manifest, 0, run.model, strict=True).targets
    assert {_local(t).data_ptr() for t in targets.values()} == set(pointers)
    reads = []
    original = module.load_tensors
    module.load_tensors = lambda tensors, **rest: (reads.append(tensors), original(tensors, **rest))
    try:
        run.engine.load(f"{root}/c", optimizers=[run.optimizer])
    finally:
        module.load_tensors = original
    assert len(reads) == 1 and len(reads[0]) > 60
    assert [p.data_ptr() for p in map(_local, run.model.parameters())] == pointers
    read = reads[0]["optimizer_0.state.blocks.1.up.weight.exp_avg"]
    kept = run.optimizer.state[run.model.blocks[1].up.weight]["exp_avg"]
    assert _local(read).data_ptr() == _local(kept).data_ptr()
    # What adapters read apart shares nothing with the model.
    state = reader.model_state(0, run.model)
    assert not {_local(t).data_ptr() for t in state.values() if t.numel()} & set(pointers)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_loading_makes_no_second_copy(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_no_second_copy, 2, str(tmp_path))


def test_prefixes_and_ties(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_prefixes, 2, str(tmp_path))


def test_several_models_and_optimizers_in_one_folder(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_several, 2, str(tmp_path))


def test_extra_state_and_buffers(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_extra_state, 2, str(tmp_path))
    for world_size in (2, 3, 1):
        pool.run(_from_other_ranks, world_size, str(tmp_path / "ranks-sync"))


def test_state_of_optimizer_refuses_strangers() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    with pytest.raises(CheckpointError, match=r"group 0 of AdamW .* shape \(3, 3\)"):
        state_of_optimizer(model, optimizer)
