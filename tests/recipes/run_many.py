"""One rank that makes several runs of the recipes in one process: imports cost more than the runs.

    LOCAL_RANK=0 RANK=0 WORLD_SIZE=2 ... python run_many.py jobs.json

A job is `{"recipe": "lightning", "env": {...}, "options": {...}}`. The environment is what
`Trainer`'s own launcher or `accelerate launch` would set for this rank. Rank 0 finds a free
port for each job when it comes to it and tells the others through a file beside jobs.json.
"""

from __future__ import annotations

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


def agree_on_port(path: Path) -> str:
    if RANKS["RANK"] == "0":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        path.with_suffix(".new").write_text(port)
        path.with_suffix(".new").replace(path)
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


def run(number: int, recipe: str, env: dict[str, str], options: dict[str, object]) -> None:
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState

    # Lightning removes WORLD_SIZE when it is done.
    port = agree_on_port(Path(sys.argv[1] + f".port{number}"))
    os.environ.update(RANKS, **env, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    module = importlib.import_module(f"finetune_llama_{recipe}")
    module.main(module.Options(**options))
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


if __name__ == "__main__":
    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        print(f"--- {time.perf_counter():.1f} s {job}", flush=True)
        run(number, **job)
