"""Memory of sharded training: what it should be, what it is, and its curves."""

from shardplug.memory.account import (
    ElementBytes,
    Moment,
    ParameterSize,
    StateBytes,
    bytes_per_parameter,
    model_states,
    paper_bytes,
)
from shardplug.memory.picture import PngSink, draw_png
from shardplug.memory.row import BOOK_KINDS, KINDS, PHASES, TIER_KINDS, MemoryRow
from shardplug.memory.sinks import JsonlSink, Sink, read_jsonl
from shardplug.memory.tracker import MemoryTracker
from shardplug.memory.wandb_sink import WandbSink

__all__ = [
    "BOOK_KINDS",
    "KINDS",
    "PHASES",
    "TIER_KINDS",
    "ElementBytes",
    "JsonlSink",
    "MemoryRow",
    "MemoryTracker",
    "Moment",
    "ParameterSize",
    "PngSink",
    "Sink",
    "StateBytes",
    "WandbSink",
    "bytes_per_parameter",
    "draw_png",
    "model_states",
    "paper_bytes",
    "read_jsonl",
]
