"""The script of the guide "Resume anywhere", taken out of the page and run."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import socket
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from shardplug.checkpoint import resume_point

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "resume.md"


def script() -> str:
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```$", GUIDE.read_text(), re.M | re.S)
    found = [textwrap.dedent(code) for _, code in blocks if "sys.argv[1]" in code]
    assert len(found) == 1
    return found[0]


def rank_main(path: str, epochs: int, seed: int, rank: int, world_size: int, port: int) -> None:
    folder = Path(path).parent
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # of the loader's workers, as in a shell
    sys.argv = [path, str(epochs)]
    torch.manual_seed(seed + rank)
    sys.stdout = (folder / f"out-{rank}").open("w")
    sys.stderr = (folder / f"errors-{rank}").open("w")
    runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()


def torchrun(path: Path, epochs: int, world_size: int, seed: int = 0) -> list[str]:
    """What `torchrun --nproc-per-node N train.py EPOCHS` does; return what rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # that of the rank pool: torch is loaded
    ranks = [
        context.Process(target=rank_main, args=(str(path), epochs, seed, rank, world_size, port))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size, (path.parent / "errors-0").read_text()[-3000:]
    return (path.parent / "out-0").read_text().splitlines()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("pool")
def test_the_script_goes_on_where_it_was(tmp_path: Path) -> None:
    paths = [tmp_path / name / "train.py" for name in ("straight", "resumed")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(script())
    straight = torchrun(paths[0], 2, 2)
    assert [line.split(":")[0] for line in straight] == [f"step {n}" for n in range(1, 41)]
    folder = paths[1].parent
    # The two commands of the guide: one epoch on two ranks, and a second one on three.
    assert torchrun(paths[1], 1, 2) == straight[:20]
    point = resume_point(folder / "runs/plain")
    assert point is not None and point.path.name == "step-16" and not point.passed_over
    on_three = torchrun(paths[1], 2, 3, seed=7)
    assert [line.split(":")[0] for line in on_three] == [f"step {n}" for n in range(17, 41)]
    losses = [float(line.split()[-1]) for line in on_three]
    assert sum(losses[-6:]) < sum(losses[:6])
    # From step 16 again, on two: dropout and order of the straight run, to the last digit.
    for step in (24, 32, 40):
        (folder / f"runs/plain/step-{step}/manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="Passed over: .*step-24"):
        assert resume_point(folder / "runs/plain").path.name == "step-16"  # type: ignore[union-attr]
    assert torchrun(paths[1], 2, 2, seed=9) == straight[16:]
