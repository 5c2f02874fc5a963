"""save_state and load_state: bit-equal resumes, other layouts, one whole folder or none."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import GradScalerKwargs, ProjectConfiguration, set_seed
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from shardplug import CheckpointError, ConfigError
from shardplug.checkpoint import is_checkpoint, state_of_model, state_of_optimizer, write
from tests.adapters.accelerate.common import (
    WORLD,
    accelerator,
    largest_difference,
    loader,
    seeded_model,
)
from tests.support.models import lm_loss, tokens
from tests.support.pool import RankPool

# -- the same layout: bit-equal, data order and dropout included --------------------------------


class Dropping(nn.Module):
    """A regression model with dropout in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 17)
        self.second = nn.Linear(17, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 9) -> (b, 1)."""
        return self.second(F.dropout(torch.relu(self.first(x)), 0.1, self.training))


BATCHES = 13  # per rank and epoch
SAVED_AT = (1, 7)  # in the second epoch, after its 7th step


def numbered_rows() -> list[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return list(enumerate(torch.randn(BATCHES * WORLD * 2, 9, generator=generator)))


def run_epochs(folder: str, resume: bool) -> list[tuple[list[int], float]]:
    """Train three epochs, saving in the second, or go on from there; log ids and losses."""
    acc = accelerator(zero="zero3")
    set_seed(99 if resume else 5, device_specific=True)
    net = Dropping()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    net, optimizer, scheduler, batches = acc.prepare(
        net, optimizer, scheduler, loader(numbered_rows(), shuffle=True)
    )
    first_epoch, first_step = 0, 0
    if resume:
        acc.load_state(folder)
        first_epoch, first_step = divmod(acc.completed_steps, len(batches))
        assert (first_epoch, first_step) == SAVED_AT
    log = []
    for epoch in range(first_epoch, 3):
        rest = batches
        if epoch == first_epoch and first_step:
            rest = acc.skip_first_batches(batches, first_step)
        for step, (ids, x) in enumerate(rest, start=BATCHES - len(rest)):
            loss = net(x).square().mean()
            acc.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            log.append((ids.tolist(), loss.item()))
            if not resume and (epoch, step + 1) == SAVED_AT:
                acc.save_state(folder)
    return log


def test_resume_in_the_middle_of_an_epoch_is_bit_equal(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    whole = pool.run(run_epochs, WORLD, folder, False)
    rest = pool.run(run_epochs, WORLD, folder, True)
    done = SAVED_AT[0] * BATCHES + SAVED_AT[1]
    for rank in range(WORLD):
        assert len(rest[rank]) == 3 * BATCHES - done > 6
        assert rest[rank] == whole[rank][done:]
    seen = [i for rank in whole for ids, _ in rank[:BATCHES] for i in ids]
    assert sorted(seen) == list(range(BATCHES * WORLD * 2))  # every sample once in an epoch
    second = [i for rank in whole for ids, _ in rank[BATCHES : 2 * BATCHES] for i in ids]
    assert sorted(second) == sorted(seen) and second != seen


def save_twice_in_one_epoch(folder: str, stop: bool) -> list[list[int]]:
    """Resume, then save again while the resumed epoch still runs."""
    acc = accelerator(zero="zero2")
    set_seed(5)
    net = Dropping()
    net, optimizer, batches = acc.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader(numbered_rows(), shuffle=True)
    )
    order = []
    for ids, _ in batches:
        order.append(ids.tolist())
        if len(order) == 3:
            acc.save_state(folder + "-3")
        if stop and len(order) == 3:
            break
    if not stop:
        return order
    for start in (3, 6):
        acc.load_state(f"{folder}-{start}")
        for ids, _ in acc.skip_first_batches(batches, start):
            order.append(ids.tolist())
            if len(order) == 6:
                acc.save_state(folder + "-6")
                break
    order += [ids.tolist() for ids, _ in batches]
    return order


def test_a_resumed_epoch_can_be_saved_and_resumed_again(pool: RankPool, tmp_path: Path) -> None:
    whole = pool.run(save_twice_in_one_epoch, 1, str(tmp_path / "a"), False)[0]
    pieces = pool.run(save_twice_in_one_epoch, 1, str(tmp_path / "b"), True)[0]
    assert len(whole) == BATCHES * WORLD
    assert pieces[: len(whole)] == whole
    following = pieces[len(whole) :]
    assert len(following) == len(whole) and following != whole  # the next epoch, another order


# -- other layouts ------------------------------------------------------------------------------


def train_steps(
    stage: int, first: int, last: int, load: str | None, save: str | None
) -> dict[str, torch.Tensor]:
    acc = accelerator(zero=f"zero{stage}")
    net = seeded_model(100 if load else 7)
    net, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    if load:
        acc.load_state(load)
        assert acc.completed_steps == first
    rows = 4 // acc.num_processes  # equal global batch
    for step in range(first, last):
        both = torch.cat([tokens(step, 0, rank) for rank in range(2)])
        batch = both[rows * acc.process_index :][:rows]
        acc.backward(lm_loss(net(batch), batch))
        acc.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if save:
        acc.save_state(save)
    return acc.get_state_dict(net)


@pytest.mark.parametrize(
    ("world", "stage", "to_world", "to_stage"), [(2, 3, 1, 1), (1, 2, 2, 3), (2, 1, 2, 2)]
)
def test_resume_at_another_world_size_and_stage(
    pool: RankPool, tmp_path: Path, world: int, stage: int, to_world: int, to_stage: int
) -> None:
    folder = str(tmp_path / "state")
    whole = pool.run(train_steps, world, stage, 0, 10, None, None)[0]
    pool.run(train_steps, world, stage, 0, 5, None, folder)
    ours = pool.run(train_steps, to_world, to_stage, 5, 10, folder, None)[0]
    assert largest_difference(ours, whole) <= 1e-6


def save_before_the_first_step(folder: str) -> tuple[bool, list[float]]:
    states = []
    for save in (False, True):
        acc = accelerator(zero="zero3")
        net = seeded_model()
        net, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        if save:
            acc.save_state(folder)
            acc.load_state(folder)
        batch = tokens(0, 0, dist.get_rank())
        for _ in range(3):
            acc.backward(lm_loss(net(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
        states.append({n: p.full_tensor() for n, p in named_shards(net)})
        counts = [float(values["step"]) for values in optimizer.state.values()]
    same = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return same and len(states[0]) > 10, counts


def named_shards(net: nn.Module) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in net.named_parameters() if hasattr(p, "full_tensor")]


def test_saving_before_the_first_step_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    for same, counts in pool.run(save_before_the_first_step, WORLD, str(tmp_path / "state")):
        assert same and set(counts) == {3.0}


def two_models(folder: str) -> bool:
    def build() -> Any:
        acc = accelerator(zero="zero2")
        torch.manual_seed(dist.get_rank())
        nets = [nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 3), nn.ReLU(), nn.Linear(3, 1))]
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
        return acc, *acc.prepare(*nets, *optimizers)

    def step(acc: Any, one: Any, two: Any, *optimizers: Any) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
        acc.backward(two(one(x)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    first = build()
    step(*first)
    first[0].save_state(folder)
    step(*first)
    second = build()
    second[0].load_state(folder)
    step(*second)
    pairs = [
        (a.full_tensor(), b.full_tensor())
        for i in (1, 2)
        for a, b in zip(first[i].parameters(), second[i].parameters(), strict=True)
    ]
    assert len(pairs) == 6
    return all(torch.equal(a, b) for a, b in pairs)


def test_two_models_and_optimizers_round_trip(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(two_models, WORLD, str(tmp_path / "state")) == [True, True]


def load_a_lightning_like_folder(folder: str) -> bool:
    """A LightningModule's names have a prefix, and its meta is another."""
    acc = accelerator(zero="zero1")
    net = seeded_model()
    net, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    batch = tokens(0, 0, dist.get_rank())
    acc.backward(lm_loss(net(batch), batch))
    optimizer.step()
    optimizer.zero_grad()
    inner = optimizer.optimizer
    state = state_of_optimizer([net], inner)
    write(
        folder,
        models=[{f"model.{name}": tensor for name, tensor in state_of_model(net).items()}],
        optimizers=[
            {
                "state": {f"model.{name}": values for name, values in state["state"].items()},
                "param_groups": [
                    {**group, "params": [f"model.{name}" for name in group["params"]]}
                    for group in state["param_groups"]
                ],
            }
        ],
        meta={"step": 1, "global_step": 1, "lr_schedulers": []},
    )
    before = {name: p.full_tensor().clone() for name, p in named_shards(net)}
    moments = [values["exp_avg"].full_tensor().clone() for _, values in moments_of(net, inner)]

    acc = accelerator(zero="zero3")
    net = seeded_model(55)
    net, optimizer, _ = acc.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.5),
        torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)], lr=1)),
    )
    with pytest.warns(UserWarning, match="no state of schedulers"):
        acc.load_state(folder)
    assert acc.completed_steps == 1
    assert optimizer.param_groups[0]["lr"] == 1e-2
    again = [v["exp_avg"].full_tensor() for _, v in moments_of(net, optimizer.optimizer)]
    assert len(moments) == len(again) > 10
    same = all(torch.equal(a, b) for a, b in zip(moments, again, strict=True))
    return same and all(torch.equal(before[n], p.full_tensor()) for n, p in named_shards(net))


def moments_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    return [(name, optimizer.state[p]) for name, p in named_shards(net)]


def test_a_folder_of_another_framework_loads(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(load_a_lightning_like_folder, WORLD, str(tmp_path / "state")) == [True, True]


# -- the folder -----------------------------------------------------------------------------------


class Counter:
    """Something to register for checkpointing."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the count."""
        self.count = state["count"]


def everything_in_one_folder(folder: str) -> dict[str, Any]:
    scaling = GradScalerKwargs(init_scale=256.0)
    acc = accelerator(zero="zero3", mixed_precision="fp16", kwargs_handlers=[scaling])
    net = Dropping()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    net, optimizer, scheduler = acc.prepare(net, optimizer, scheduler)
    counter = Counter()
    acc.register_for_checkpointing(counter)
    calls = []

    def hook(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        calls.append((len(models), Path(output_dir).name))
        if acc.is_main_process:
            (Path(output_dir) / "config.json").write_text("{}")

    acc.register_save_state_pre_hook(hook)
    acc.register_load_state_pre_hook(lambda models, input_dir: calls.append((0, input_dir)))
    acc.backward(net(torch.ones(2, 9)).mean())
    optimizer.step()
    scheduler.step()
    counter.count = 4
    acc.scaler.update(128.0)
    returned = acc.save_state(folder)
    assert returned == Path(folder)
    counter.count = 0
    acc.scaler.update(8.0)
    lr = scheduler.get_last_lr()
    scheduler.step()
    acc.load_state(folder)
    assert (counter.count, acc.scaler.get_scale()) == (4, 128.0)
    assert scheduler.get_last_lr() == lr == [0.25]  # two ranks: two steps of the schedule
    assert calls[0][0] == 1 and calls[0][1] != Path(folder).name  # written aside
    assert calls[1] == (0, folder)
    return {"files": sorted(p.name for p in Path(folder).iterdir()), "calls": len(calls)}


def test_everything_is_in_one_folder(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(everything_in_one_folder, WORLD, str(tmp_path / "state"))[0]
    assert found["calls"] == 2
    assert set(found["files"]) == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "config.json",
        "custom_checkpoint_0.pkl",
        "manifest.json",
        "meta.pt",
        "rng_0.pt",
        "rng_1.pt",
        "scaler.pt",
        "scheduler.bin",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["state"]  # nothing left beside it


def failing_save(folder: str) -> str:
    acc = accelerator(zero="zero3")
    net = acc.prepare(seeded_model())
    acc.save_state(folder)
    before = (Path(folder) / "manifest.json").read_text()

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        if dist.get_rank() == 1:
            raise OSError("no space left on device")

    acc.register_save_state_pre_hook(hook)
    with pytest.raises(CheckpointError, match="rank 1: OSError: no space left") as info:
        acc.save_state(folder)
    assert (Path(folder) / "manifest.json").read_text() == before
    acc.load_state(folder)
    assert net is not None
    return str(info.value)


def test_a_failing_save_raises_everywhere_and_keeps_the_old_folder(
    pool: RankPool, tmp_path: Path
) -> None:
    first, second = pool.run(failing_save, WORLD, str(tmp_path / "state"))
    assert first == second
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def automatic_names(root: str) -> list[str]:
    def build() -> Any:
        project = ProjectConfiguration(
            project_dir=root, automatic_checkpoint_naming=True, total_limit=2
        )
        acc = accelerator(zero="zero2", project_config=project)
        net = nn.Linear(5, 3)
        return acc, *acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    acc, net, _ = build()
    for value in range(4):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(value)
        folder = acc.save_state()
        assert folder.name == f"checkpoint_{value}" and acc.save_iteration == value + 1
    if acc.is_main_process:
        (Path(root) / "checkpoints" / "checkpoint_9").mkdir()  # a save that never finished
    acc.wait_for_everyone()
    acc, net, _ = build()
    acc.project_configuration.iteration = 3
    with pytest.raises(ConfigError, match="Expected a new folder"):
        acc.save_state()
    acc.load_state()
    assert acc.save_iteration == 10, "behind whatever is there"
    state = acc.get_state_dict(net)
    assert not acc.is_main_process or set(state["bias"].tolist()) == {3.0}
    return sorted(p.name for p in (Path(root) / "checkpoints").iterdir())


def test_automatic_naming_and_total_limit(pool: RankPool, tmp_path: Path) -> None:
    names = pool.run(automatic_names, WORLD, str(tmp_path))[0]
    assert names == ["checkpoint_2", "checkpoint_3", "checkpoint_9"]


class Trap:
    """Registered for checkpointing; its state makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def state_dict(self) -> dict[str, Any]:
        return {"trap": self}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def wrong_folders(root: str) -> None:
    acc = accelerator(zero="zero3")
    net = seeded_model()
    net, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="found nothing"):
        acc.load_state(f"{root}/missing")
    stock = Path(root) / "stock"
    if acc.is_main_process:
        stock.mkdir()
        (stock / "pytorch_model_fsdp.bin").touch()
    acc.wait_for_everyone()
    with pytest.raises(CheckpointError, match="Accelerate FSDP checkpoint with full state dicts"):
        acc.load_state(stock)
    with pytest.raises(ConfigError, match=r"save_state\(output_dir\)"):
        acc.save_state()
    with pytest.raises(ConfigError, match=r"load_state\(input_dir\)"):
        acc.load_state()
    with pytest.raises(ConfigError, match="safe_serialization=False"):
        acc.save_state(f"{root}/other", safe_serialization=False)
    with pytest.raises(CheckpointError, match="folder with other things"):
        acc.save_state(stock)
    acc.save_state(f"{root}/state")
    acc.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match="1 registered objects"):
        acc.load_state(f"{root}/state")
    acc.register_for_checkpointing(Trap(f"{root}/marker"))
    acc.save_state(f"{root}/trap")
    with pytest.raises(CheckpointError, match=r"pkl is damaged, or holds objects that run code"):
        acc.load_state(f"{root}/trap")
    assert not os.path.exists(f"{root}/marker")
    acc.wait_for_everyone()
    acc.load_state(f"{root}/trap", load_kwargs={"weights_only": False})
    assert os.path.exists(f"{root}/marker")
    acc = accelerator(zero="zero3")
    other = nn.Linear(3, 3)
    acc.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"weight"):
        acc.load_state(f"{root}/state")


def test_wrong_folders_and_options_are_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(wrong_folders, WORLD, str(tmp_path))


# -- schedules ------------------------------------------------------------------------------------

UPDATES = 20


def learning_rates(mode: str, world_steps: bool) -> list[float]:
    """Run a linear decay over 20 updates of 2 micro-batches each (case 16)."""
    from accelerate.utils import DataLoaderConfiguration

    kwargs: dict[str, Any] = {}
    if mode == "split_batches":
        kwargs["dataloader_config"] = DataLoaderConfiguration(split_batches=True)
    acc = accelerator(zero="zero1", gradient_accumulation_steps=2, **kwargs)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    total = UPDATES * (acc.num_processes if world_steps else 1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    net, optimizer = acc.prepare(net, optimizer)
    if mode != "not prepared":
        scheduler = acc.prepare(scheduler)
    rates = []
    for _ in range(UPDATES * 2):
        with acc.accumulate(net):
            acc.backward(net(torch.ones(2, 3)).mean())
            optimizer.step()
            if mode != "not prepared" or acc.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
            if acc.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    ("mode", "world_steps"), [("default", True), ("split_batches", False), ("not prepared", False)]
)
def test_schedule_is_the_one_process_schedule_in_each_mode(
    pool: RankPool, mode: str, world_steps: bool
) -> None:
    expected = [1 - (k + 1) / UPDATES for k in range(UPDATES)]
    for rates in pool.run(learning_rates, WORLD, mode, world_steps):
        assert rates == pytest.approx(expected, abs=1e-12)


def scheduled(folder: str, kind: str, first: int, last: int) -> list[float]:
    acc = accelerator(zero="zero1")
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    total = UPDATES * acc.num_processes
    scheduler: Any
    if kind == "lambda":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    net, optimizer, scheduler = acc.prepare(net, optimizer, scheduler)
    if first:
        acc.load_state(folder)
    rates = []
    for _ in range(first, last):
        acc.backward(net(torch.ones(2, 3)).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    if not first:
        acc.save_state(folder)
    return rates


def test_schedule_goes_on_at_another_world_size(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    rates = pool.run(scheduled, 2, folder, "lambda", 0, 5)[0]
    rates += pool.run(scheduled, 1, folder, "lambda", 5, 10)[0]
    assert rates == pytest.approx([1 - (k + 1) / UPDATES for k in range(10)], abs=1e-12)


def refuse_cosine(folder: str) -> None:
    with pytest.raises(CheckpointError, match="split_batches=True"):
        scheduled(folder, "cosine", 5, 10)


def test_schedules_that_cannot_change_world_size_say_so(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    pool.run(scheduled, 2, folder, "cosine", 0, 5)
    assert len(pool.run(scheduled, 2, folder, "cosine", 5, 6)[0]) == 1
    pool.run(refuse_cosine, 1, folder)


# -- exported weights -----------------------------------------------------------------------------


def export(root: str) -> dict[str, list[str]]:
    acc = accelerator(zero="zero3")
    net = acc.prepare(seeded_model(tied=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Accelerate tells that it wrote the tied tensor once
        acc.save_model(net, f"{root}/one")
        acc.save_model(net, f"{root}/many", max_shard_size="10KB")
    (Path(root) / "file").touch()
    with pytest.raises(ConfigError, match="got the file"):
        acc.save_model(net, f"{root}/file")
    assert acc.unwrap_model(net) is net
    return {name: sorted(p.name for p in (Path(root) / name).iterdir()) for name in ("one", "many")}


def test_save_model_writes_whole_weights_once(pool: RankPool, tmp_path: Path) -> None:
    files = pool.run(export, WORLD, str(tmp_path))[0]
    assert files["one"] == ["model.safetensors"]
    assert "model.safetensors.index.json" in files["many"] and len(files["many"]) > 2
    expected = seeded_model(tied=True).state_dict()
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert len(whole.keys() & {"embed.weight", "head.weight"}) == 1  # tied: once
    assert len(whole) == len(expected) - 1
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.items())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    parts = {
        name: load_file(tmp_path / "many" / file)[name]
        for name, file in index["weight_map"].items()
    }
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert not is_checkpoint(tmp_path / "one")


def save_inside_a_window(folder: str) -> None:
    acc = accelerator(zero="zero1", gradient_accumulation_steps=2)
    net = seeded_model()
    net, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = tokens(0, 0, dist.get_rank())
    with acc.accumulate(net):
        acc.backward(lm_loss(net(batch), batch))
        optimizer.step()
        optimizer.zero_grad()
    with contextlib.ExitStack() as stack:
        if acc.is_main_process:
            stack.enter_context(pytest.warns(UserWarning, match="middle of an accumulation"))
        acc.save_state(folder)
    # A resumed run is in the middle of that window, too: its next micro-batch is the last one.
    acc = accelerator(zero="zero3", gradient_accumulation_steps=2)
    net = seeded_model(seed=8)
    net, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with contextlib.ExitStack() as stack:
        if acc.is_main_process:
            stack.enter_context(pytest.warns(UserWarning, match="other micro-batches only"))
        acc.load_state(folder)
    for micro, steps in ((1, 1), (2, 1), (3, 2)):
        batch = tokens(0, micro, dist.get_rank())
        with acc.accumulate(net):
            acc.backward(lm_loss(net(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
        assert acc.completed_steps == steps
    whole, plain = acc.engine.full_state_dict(rank0_only=False), seeded_model()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for micro in (1, 2, 3):
        for rank in range(WORLD):
            batch = tokens(0, micro, rank)
            (lm_loss(plain(batch), batch) / (2 * WORLD)).backward()
        if micro != 2:
            reference.step()
            reference.zero_grad()
    assert len(whole) > 10
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)


def test_saving_inside_a_window_warns_of_what_is_lost(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_inside_a_window, WORLD, str(tmp_path / "state"))
    assert is_checkpoint(tmp_path / "state")


def two_loaders(folder: str, resume: bool) -> list[list[list[int]]]:
    """Pass twice through one loader and once through another; return their next passes."""
    acc = accelerator(zero="zero3")
    set_seed(99 if resume else 5)
    net = nn.Linear(9, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _, _, first, second = acc.prepare(
        net, optimizer, *(loader(numbered_rows(), shuffle=True) for _ in range(2))
    )
    if resume:
        acc.load_state(folder)
    else:
        for one in (first, first, second):
            assert len(list(one)) == BATCHES
        acc.save_state(folder)
    return [[ids.tolist() for ids, _ in one] for one in (first, second)]


def test_each_loader_goes_on_by_itself(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    whole = pool.run(two_loaders, WORLD, folder, False)
    assert pool.run(two_loaders, WORLD, folder, True) == whole
    assert whole[0][0] != whole[0][1] and len(whole[0][0]) == BATCHES
