"""A torch that was built without torch.distributed: imports and help work, the rest says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What such a build lacks is gone before torch looks for it.
WITHOUT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for part in ("_c10d_init", "_rpc_init", "_dist_autograd_init"):
                delattr(sys.modules["torch._C"], part)
        return None
sys.meta_path.insert(0, Finder())
import torch
assert not torch.distributed.is_available()
"""

# What can be asked is False, and what is asked for is there: a test's or a vendor's own doing.
PATCHED = """
import torch
torch.distributed.is_available = lambda: False
"""

USES = """
import shardplug
config = shardplug.ZeroConfig(stage=2)
assert shardplug.ZeroConfig.preset("zero3").stage == 3
def refused(use):
    try:
        use()
    except shardplug.ConfigError as error:
        assert "Expected a build of torch with torch.distributed" in str(error), error
    else:
        raise AssertionError("not refused")
refused(lambda: shardplug.ZeroEngine(config))
for part in ("accelerate", "checkpoint", "engine", "fabric", "hf", "lightning", "memory", "run"):
    refused(lambda: __import__(f"shardplug.{part}"))
from shardplug.cli import main
assert main(["plan", "meta-llama/Llama-3.1-8B", "--world-size", "8"]) == 2
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
print("reached the end")
"""


@pytest.mark.parametrize("begin", (WITHOUT, PATCHED), ids=("without", "patched"))
def test_without_torch_distributed(begin: str) -> None:
    """Case 87."""
    environment = {key: value for key, value in os.environ.items() if key != "USE_LIBUV"}
    done = subprocess.run(
        [sys.executable, "-c", begin + USES],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "reached the end" in done.stdout
    for command in ("doctor", "export", "inspect", "plan"):
        assert f"    {command}" in done.stdout
    assert done.stderr.startswith("shardplug: Expected a build of torch with torch.distributed")
