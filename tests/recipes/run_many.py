"""One rank that makes several runs of the recipes in one process: imports cost more than the runs.

    LOCAL_RANK=0 RANK=0 WORLD_SIZE=2 ... python run_many.py jobs.json

A job is `{"recipe": "lightning", "env": {...}, "options": {...}}`. The environment is what
`Trainer`'s own launcher or `accelerate launch` would set for this rank. Rank 0 finds a free
port for each job when it comes to it and tells the others through a file beside jobs.json. A job
with `"alone": 1` is a run of one rank, made in the process of rank 1 while the others go on.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
RANKS = {name: os.environ[name] for name in NAMES}

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def agree_on_port(path: Path) -> str:
    if RANKS["RANK"] == "0":
        path.with_suffix(".new").write_text(free_port())
        path.with_suffix(".new").replace(path)
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


def spare_what_every_run_repeats() -> None:
    """The tiny tokenizer is trained once a process, samples have four tokens, pictures nothing."""
    import llama
    from matplotlib.figure import Figure

    trained = functools.cache(llama._train_tokenizer)
    llama._train_tokenizer = lambda: copy.deepcopy(trained())
    llama.sample = functools.partial(llama.sample, max_new_tokens=4)
    Figure.savefig = lambda figure, path, **options: Path(path).touch()


def run(
    number: int,
    recipe: str,
    env: dict[str, str],
    options: dict[str, object],
    alone: int | None = None,
) -> None:
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from shardplug import watchdog

    if alone is not None and str(alone) != RANKS["RANK"]:
        return
    ranks = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    if alone is None:
        ranks, port = RANKS, agree_on_port(Path(sys.argv[1] + f".port{number}"))
    else:
        port = free_port()
    # Lightning removes WORLD_SIZE when it is done.
    os.environ.update(ranks, **env, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    module = importlib.import_module(f"finetune_llama_{recipe}")
    module.main(module.Options(**options))
    if dist.is_initialized():
        dist.destroy_process_group()
    watchdog.stop()  # a run of one rank would not, and this one's ranks are not lost
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


if __name__ == "__main__":
    spare_what_every_run_repeats()
    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        print(f"--- {time.perf_counter():.1f} s {job}", flush=True)
        run(number, **job)
