"""Fixtures for every test."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from tests.support.pool import RankPool
from tests.support.slow import slow_tests


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests/slow.txt lists."""
    for mark, beginnings in slow_tests().items():
        for item in items:
            if item.nodeid.startswith(beginnings):
                item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One folder for what tests, ranks and launchers put aside, gone when the process is.

    Launchers, W&B and processes that are killed leave folders behind. It is not below `tmp_path`:
    sockets are made in it, whose paths may have 107 characters.
    """
    tmp_path_factory.getbasetemp()  # made where it always is, and kept as pytest keeps it
    outside = tempfile.gettempdir()
    compiled = os.path.join(outside, f"torchinductor_{getpass.getuser()}")  # torch's own cache
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
    folder = tempfile.mkdtemp(prefix="shardplug-tests-")
    os.chmod(folder, 0o711)  # some tests act as another user in a folder below
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After multiprocessing has removed its own folder, at -100. Other processes that are just
    # ending may still write into it.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Resident gloo ranks, shared by the whole session."""
    ranks = RankPool()
    yield ranks
    ranks.close()
