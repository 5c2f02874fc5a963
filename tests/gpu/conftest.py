"""A process group of one rank on a GPU."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("nccl", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
