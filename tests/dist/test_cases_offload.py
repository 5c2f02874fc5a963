"""Reported failures of offloading elsewhere: none of them happens here."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardplug
from shardplug import ConfigError, OptimizerError, StorageError, ZeroConfig, ZeroEngine
from shardplug.cli import main
from shardplug.core import grads
from shardplug.core._torch.tensors import local_tensor
from shardplug.memory import plan
from tests.dist.test_offload import config, owned, run, same_state, same_weights, train
from tests.dist.test_offload_checkpoint import fresh
from tests.support.drives import memory_drive
from tests.support.faults import files_in
from tests.support.parity import raises_everywhere
from tests.support.pool import RankPool

GIB = 2**30


class Matrices(nn.Module):
    """Matrices of 6x10, 10x6, 7x10 and 7x5, wide and tall, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(10, 6)
        self.b = nn.Linear(6, 10)
        self.c = nn.Linear(10, 7)
        self.d = nn.Linear(7, 5, bias=False)
        self.e = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, 10]; returns [b, 7]."""
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.tanh(layer(x))
        return self.e(x)


def matrix_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(4, 10, generator=chance), torch.randn(4, 7, generator=chance)
    return nn.functional.mse_loss(model(x), y)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


# -------------------------------------------------------------------- 23: who holds the state


def state_moves(root: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    whole = sum(p.numel() for p in model.parameters())
    foreseen = plan(
        copy.deepcopy(model),
        devices=dist.get_world_size(),
        device_memory_gib=64,
        batch=torch.ones(2, 512),
        loss=lambda model, batch: model(batch).sum(),
        precision="32-true",
        loop="pytorch",
        device="cpu",
    )
    predicted = next(c for c in foreseen.choices if c.name == "zero1_cpu")
    engine = ZeroEngine(ZeroConfig(stage=1, offload_optimizer="cpu"))
    model = engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    with engine.micro_step():
        model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 8
    for parameter, state in optimizer.state.items():
        assert parameter.device.type == engine.device.type
        assert all(local_tensor(state[k]).device.type == "cpu" for k in ("exp_avg", "exp_avg_sq"))
    # Moved and not copied: the optimizer has nothing but its counters on the device.
    states = engine.memory()
    assert states["optimizer_state"] == 8 * 4
    measured = states["optimizer_state_cpu"]
    assert measured == engine._offload.optimizer_tier.held_bytes  # type: ignore[union-attr]
    at_rest = predicted.timeline.phases["at_rest"]["optimizer_state_cpu"]
    assert measured == pytest.approx(at_rest, rel=0.1)
    # So says what is printed before a run.
    assert measured == pytest.approx(8 * whole / engine.world_size, rel=0.1)


@pytest.mark.parametrize("world_size", (1, 2))
def test_case_23_state_moves_and_is_foreseen(
    pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    """State is moved, not copied, and its bytes are said before."""
    pool.run(state_moves, world_size, str(tmp_path))


def test_case_23_the_estimate_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--parameters", "500m", "--ranks", "2", "--mib", "1"]) == 0
    said = re.search(r'"cpu": ([\d.]+) GiB of CPU memory a rank', capsys.readouterr().out)
    assert said is not None and float(said[1]) == pytest.approx(8 * 250e6 / GIB, rel=0.01)


# -------------------------------------------------------------------- 63, 65: whole matrices


def muon_updates(stage: int, root: str) -> None:
    torch.manual_seed(7)
    reference = Matrices()
    model = copy.deepcopy(reference)
    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    engine.shard(model)
    ours = [engine.prepare_optimizer(o) for o in muon_and_adamw(model)]
    theirs = muon_and_adamw(reference)

    def steps(engine: ZeroEngine, model: nn.Module, optimizers: Any, turns: range) -> None:
        for step in turns:
            with engine.micro_step():
                matrix_loss(model, step, engine.rank).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    before = copy.deepcopy(reference.state_dict())
    for step in range(4):
        for rank in range(engine.world_size):
            (matrix_loss(reference, step, rank) / engine.world_size).backward()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
        steps(engine, model, ours, range(step, step + 1))
        if step == 1:
            engine.save(f"{root}/stage{stage}", optimizers=ours)
    found = engine.full_state_dict(model, rank0_only=False)
    compared = 0
    for name, value in reference.state_dict().items():
        one, two = (found[name] - before[name]).flatten(), (value - before[name]).flatten()
        assert torch.cosine_similarity(one, two, dim=0) >= 0.999, name
        assert 0.99 <= float(one.norm() / two.norm()) <= 1.01, name
        compared += 1
    assert compared == 9
    # Each rank works on whole matrices: what is left is the order of the gradients' sum.
    assert all(torch.allclose(found[n], v, atol=1e-4) for n, v in reference.state_dict().items())
    # The momentum is in the checkpoint.
    torch.manual_seed(8)
    other = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    again = other.shard(Matrices())
    optimizers = [other.prepare_optimizer(o) for o in muon_and_adamw(again)]
    other.load(f"{root}/stage{stage}", optimizers=optimizers)
    steps(other, again, optimizers, range(2, 4))
    same_weights((other, again), (engine, model))
    assert same_state(optimizers[0], ours[0]) == 5


@pytest.mark.parametrize("world_size", (2, 3))
def test_case_63_muon_sees_whole_matrices(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    """Newton-Schulz runs on the matrix, not on a rank's rows."""
    for stage in (1, 3):
        pool.run(muon_updates, world_size, stage, str(tmp_path))


def refused(kinds: tuple[str, ...], root: str) -> None:
    from transformers.optimization import Adafactor

    engines = [ZeroEngine(config(2, tier, root)) for tier in ("none", "cpu", "nvme")]
    for engine in engines:
        model = engine.shard(Matrices())
        matrices = [p for p in model.parameters() if p.ndim == 2]
        made = {
            "Muon": torch.optim.Muon(matrices, lr=0.02),
            "torch": torch.optim.Adafactor(model.parameters()),
            "transformers": Adafactor(model.parameters()),
        }
        for kind in kinds:
            if kind == "Muon" and engine.config.offload_optimizer == "none":
                continue
            with raises_everywhere(OptimizerError, f"got {type(made[kind]).__name__}", "Use "):
                engine.prepare_optimizer(made[kind])
        plain = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
        with engine.micro_step():
            matrix_loss(model, 0, engine.rank).backward()
        plain.step()  # a refusal has changed nothing


def test_case_63_muon_is_refused_under_offload(pool: RankPool, tmp_path: Path) -> None:
    """Its state cannot be brought in part by part; it is named at set-up, on every rank."""
    pool.run(refused, 2, ("Muon",), str(tmp_path))


def test_case_65_adafactor_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """Both Adafactors are named at set-up, on every rank, wherever the state is to live."""
    pool.run(refused, 2, ("torch", "transformers"), str(tmp_path))


# -------------------------------------------------------------------- 89: nothing is compiled

BARE = """
import os, sys, torch, torch.distributed as dist
from shardplug import ZeroConfig, ZeroEngine
from shardplug.cli import main
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
before = set(sys.modules)
engine = ZeroEngine(ZeroConfig(stage=1, offload_optimizer="nvme", nvme_path=sys.argv[1]))
model = engine.shard(torch.nn.Linear(64, 64))
optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
for _ in range(2):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
assert engine.traffic()["bytes_read"] > 0
assert "torch.utils.cpp_extension" not in sys.modules
assert not [name for name in sys.modules if "aio" in name.lower()]
assert "libaio" not in open("/proc/self/maps").read()
dist.destroy_process_group()
sys.exit(main(["doctor", "--nvme-path", sys.argv[1], "--parameters", "1m", "--mib", "4"]))
"""


def test_case_89_no_compiler_is_needed(tmp_path: Path) -> None:
    """Files are read and written without a compiler, a build or libaio, and doctor says how."""
    environment = {
        "PATH": str(tmp_path / "nothing"),
        "CC": "/nowhere/cc",
        "CXX": "/nowhere/c++",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"way: (O_DIRECT, past the page cache|page cache, no O_DIRECT)", done.stdout)
    assert "threads of Python, nothing is compiled" in done.stdout
    package = Path(shardplug.__file__).parent
    assert not [p for p in package.rglob("*") if p.suffix in (".so", ".c", ".cpp", ".cu")]
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".so", ".o")]


# -------------------------------------------------------------------- 91: sizes and full drives


def awkward_sizes(root: str) -> None:
    """Sizes off 512 and 4096 bytes, one element, empty shards."""
    for name in ("adamw", "sgd"):
        plain = train(1, "none", None, name, flat=True, steps=3)
        ours = train(1, "nvme", root, name, flat=True, steps=3)
        same_weights(ours[:2], plain[:2])
        assert same_state(ours[2], plain[2])
    assert ours[0].rank == 0 or 0 in owned(ours[1])


def too_large(drive: str) -> None:
    engine = ZeroEngine(config(1, "nvme", drive))
    model = engine.shard(nn.Linear(1000, 1000))
    needed = 8 * 1001 * 1000 // engine.world_size
    # On every rank, with the path, the bytes needed and those free.
    printed = io.StringIO()
    with (
        raises_everywhere(StorageError, drive, "bytes free: No space left"),
        contextlib.redirect_stderr(printed),
    ):
        try:
            engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
        except StorageError as error:
            said = re.search(r"room for (\d+) bytes .* has (\d+) bytes free", str(error))
            assert said is not None
            assert needed <= int(said[1]) <= needed * 1.05 and int(said[2]) <= 5 * 2**20
            raise
    assert "memory" not in printed.getvalue(), "a full drive is not a want of memory"


def denied(root: str) -> None:
    """EACCES from the system's own call, since tests may run as root, whom nothing is denied."""
    original = os.open
    rank = dist.get_rank()

    def no_right(path: Any, *args: Any, **kwargs: Any) -> int:
        if rank == 1 and "shardplug-swap" in os.fspath(path):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        return original(path, *args, **kwargs)

    with (
        mock.patch.object(os, "open", no_right),
        raises_everywhere(ConfigError, root, "Permission denied"),
    ):
        ZeroEngine(config(1, "nvme", root))
    with raises_everywhere(ConfigError, f"{root}/missing does not exist"):
        ZeroEngine(config(1, "nvme", f"{root}/missing"))


def test_case_91_awkward_sizes(pool: RankPool, tmp_path: Path) -> None:
    """States of 1, 511, 513, 4097 elements and empty shards equal those in memory bit for bit."""
    pool.run(awkward_sizes, 2, str(tmp_path))


def test_case_91_a_filesystem_of_5_mb(pool: RankPool, tmp_path: Path) -> None:
    """Too little room is said at set-up; what fits runs, also where O_DIRECT is not to be had."""
    with memory_drive(tmp_path / "drive", 5 * 2**20) as drive:
        pool.run(too_large, 2, str(drive))
        pool.run(awkward_sizes, 2, str(drive))


def test_case_91_folders_without_rights(pool: RankPool, tmp_path: Path) -> None:
    """EACCES and a missing folder are said at set-up, with the path, on every rank."""
    pool.run(denied, 2, str(tmp_path))


# -------------------------------------------------------------------- 92: checkpoints, real values


def saves(root: str) -> None:
    engine, model, optimizer = train(2, "nvme", root, "adamw", flat=True, steps=3)
    engine.save(f"{root}/three", optimizers=[optimizer])
    assert not [name for name in files_in(f"{root}/three") if name.endswith(".swap")]


def continues(root: str) -> None:
    """At another number of ranks the data differs, so one resumed run is held against another."""
    found = {}
    for tier in ("none", "cpu", "nvme"):
        engine, model, optimizer = fresh(tier, root, "adamw")
        engine.load(f"{root}/three", optimizers=[optimizer])
        run(engine, model, optimizer, range(3, 6), clip=True)
        found[tier] = (engine, model, optimizer)
    for tier in ("cpu", "nvme"):
        same_weights(found[tier][:2], found["none"][:2])
        assert same_state(found[tier][2], found["none"][2])


def real_values(root: str) -> None:
    """What reads state gets values or an error, never a placeholder."""
    plain = train(2, "none", None, "adamw", flat=True, steps=3)
    engine, model, optimizer = train(2, "nvme", root, "adamw", flat=True, steps=3)
    assert same_state(optimizer, plain[2]) == 18
    theirs = plain[2].state_dict()["state"]
    ours = optimizer.state_dict()["state"]
    assert list(ours) == list(theirs)
    for index, values in theirs.items():
        for key, value in values.items():
            assert torch.equal(local_tensor(ours[index][key]), local_tensor(value)), (index, key)
    parameter = model.parts[-1]  # type: ignore[index]
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[parameter][key].full_tensor().any()
    optimizer.state[parameter]["exp_avg"].mul_(0)  # a reset, in place and by a new value
    optimizer.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
    for key in ("exp_avg", "exp_avg_sq"):
        assert not optimizer.state[parameter][key].full_tensor().any()
    # An average of the weights, and the gradients' norm, are of real weights and gradients.
    average = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for name, value in model.state_dict().items():
        average[name].lerp_(value, 0.5)
        assert value.numel() and torch.equal(average[name], value * 0.5), name
    for one in (engine, plain[0]):
        with one.micro_step():
            one.models[0](torch.tensor(1.0 + one.rank)).backward()
    assert engine.grad_norm() == plain[0].grad_norm() > 0


@pytest.mark.parametrize("world_size", (1, 3))
def test_case_92_state_in_files_is_saved(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    """Saved from files on two ranks, continued on one and three, in every tier alike."""
    pool.run(saves, 2, str(tmp_path))
    pool.run(continues, world_size, str(tmp_path))


def test_case_92_no_placeholders(pool: RankPool, tmp_path: Path) -> None:
    """`state_dict`, `optimizer.state`, an average and the norm see real values."""
    pool.run(real_values, 2, str(tmp_path))


# -------------------------------------------------------------------- 95: clipping


def clipping(root: str) -> None:
    groups = []
    original = grads.global_norm

    def watched(targets: Any, norm_type: float, group: dist.ProcessGroup) -> float:
        groups.append(group)
        return original(targets, norm_type, group)

    norms: dict[str, list[float]] = {}
    with mock.patch.object(grads, "global_norm", watched):
        for tier in ("none", "cpu", "nvme"):
            engine, model, optimizer = fresh(tier, root, "adamw")
            norms[tier] = []
            for step in range(4):
                with engine.micro_step():
                    model(torch.tensor(1.0 + 0.1 * step + 0.7 * engine.rank)).backward()
                norms[tier].append(engine.clip_grad_norm(1.0))
                optimizer.step()
                optimizer.zero_grad()
    assert norms["cpu"] == norms["none"] and norms["nvme"] == norms["none"]
    assert min(norms["none"]) > 0
    # Gradients stay on the device, so its group is the one that can reduce their norm.
    device = next(model.parameters()).device
    assert len(groups) == 12
    for group in groups:
        value = torch.ones((), device=device)
        dist.all_reduce(value, group=group)
        assert float(value) == dist.get_world_size(group)
    # What ranks tell each other about their drives is on the CPU whatever the device.
    told = torch.ones(())
    dist.all_reduce(told, group=engine._control)
    assert float(told) == engine.world_size


@pytest.mark.parametrize("world_size", (1, 2))
def test_case_95_offload_with_clipping(pool: RankPool, world_size: int) -> None:
    """The norm is that of a run without offload, over a group that has a backend for it."""
    with tempfile.TemporaryDirectory() as root:
        pool.run(clipping, world_size, root)
