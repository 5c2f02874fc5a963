"""The engine that plain loops use and every integration stands on."""

from shardplug.engine.engine import ZeroEngine

__all__ = ["ZeroEngine"]
