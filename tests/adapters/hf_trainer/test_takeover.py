"""The engine is found whatever is imported first, and only in a process launched for it."""

from __future__ import annotations

import os
import sys

import accelerate
import pytest
import transformers.trainer

from tests.support.processes import Processes

ORDERS = {
    "shardplug last": "import transformers.trainer as t, accelerate, shardplug",
    "our Accelerator first": "import shardplug.accelerate, accelerate, transformers.trainer as t",
}
CHECK = """
from transformers.trainer_utils import get_last_checkpoint
from transformers import Trainer, TrainingArguments
names = (t.Accelerator, t.save_fsdp_model, t.save_fsdp_optimizer, t.load_fsdp_model,
         t.load_fsdp_optimizer, t.get_last_checkpoint, get_last_checkpoint, accelerate.Accelerator,
         accelerate.accelerator.Accelerator)
ours = "shardplug.integrations.accelerate"
others = [name for name in names if not name.__module__.startswith(ours)]
assert not others, others
assert issubclass(t.Accelerator, accelerate.Accelerator)
try:
    TrainingArguments(deepspeed={"zero_optimization": {"stage": 3}})
except shardplug.ConfigError as error:
    print(error)
"""


@pytest.mark.timeout(200)
def test_names_are_replaced_in_every_order_of_imports() -> None:
    launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "shardplug:zero3"}
    env = {**os.environ, "OMP_NUM_THREADS": "1", **launched}
    with Processes() as processes:
        started = {
            name: processes.start([sys.executable, "-c", f"{code}{CHECK}"], env=env)
            for name, code in ORDERS.items()
        }
        for name, process in started.items():
            output, errors = process.communicate(timeout=150)
            assert process.returncode == 0, f"{name}: {errors[-3000:]}"
            assert "Expected shardplug to be the only engine, got deepspeed=" in output, name


def test_other_processes_keep_what_they_have() -> None:
    import shardplug.accelerate  # noqa: F401

    assert "ACCELERATE_USE_FSDP" not in os.environ
    assert accelerate.Accelerator.__module__ == "accelerate.accelerator"
    assert transformers.trainer.Accelerator is accelerate.Accelerator
    assert transformers.trainer.load_fsdp_model.__module__.startswith("accelerate.")
