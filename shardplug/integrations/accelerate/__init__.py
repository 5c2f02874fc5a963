"""shardplug under Hugging Face Accelerate: an `Accelerator` that shards with ZeRO 1, 2 or 3.

    -from accelerate import Accelerator
    +from shardplug.accelerate import Accelerator

The stage is written in the YAML given to `accelerate launch` (`fsdp_sharding_strategy:
"shardplug:zero3"`) or in Python (`Accelerator(zero="zero3")`). A script that must not change runs
as `accelerate launch --config_file zero3.yaml -m shardplug.run script.py`.
"""

from shardplug.integrations.accelerate.accelerator import Accelerator
from shardplug.integrations.accelerate.monitoring import make_monitor

__all__ = ["Accelerator", "make_monitor"]
