"""How this process was launched."""

from __future__ import annotations

import os

__all__ = ["launched_with_shardplug"]


def launched_with_shardplug() -> bool:
    """Whether `accelerate launch` read a YAML with `fsdp_sharding_strategy: "shardplug:..."`."""
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return fsdp and os.environ.get("FSDP_SHARDING_STRATEGY", "").startswith("shardplug:")
