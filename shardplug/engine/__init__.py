"""The engine that plain loops use and every integration stands on."""

from shardplug.engine.engine import ZeroEngine
from shardplug.engine.listener import EngineListener

__all__ = ["EngineListener", "ZeroEngine"]
