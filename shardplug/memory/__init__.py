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
from shardplug.memory.auto import AutoBudget, auto_config
from shardplug.memory.choices import Choice, Room
from shardplug.memory.comparison_picture import draw_comparison
from shardplug.memory.costs import Machine, StepTime
from shardplug.memory.counted import CountedAllocations
from shardplug.memory.curve import PLAN_KINDS, Moved, Point, Walk
from shardplug.memory.lora import Lora
from shardplug.memory.oom import OutOfMemory, explained_oom, is_out_of_memory, oom_report
from shardplug.memory.optimizers import OPTIMIZERS, OptimizerKind
from shardplug.memory.picture import PngSink, draw_png
from shardplug.memory.plan import Plan, plan
from shardplug.memory.plan_picture import draw_plan
from shardplug.memory.plan_sink import PlanSink
from shardplug.memory.report import accelerate_yaml, as_dict, as_text, lightning_line
from shardplug.memory.request import Request
from shardplug.memory.row import BOOK_KINDS, KINDS, PHASES, TIER_KINDS, MemoryRow
from shardplug.memory.run_plan import FirstStep, RunPlan
from shardplug.memory.sinks import JsonlSink, Sink, read_jsonl
from shardplug.memory.throughput import PEAK_TFLOPS
from shardplug.memory.tracker import MemoryTracker
from shardplug.memory.wandb_sink import WandbSink
from shardplug.memory.watch import Finding

__all__ = [
    "BOOK_KINDS",
    "KINDS",
    "OPTIMIZERS",
    "PEAK_TFLOPS",
    "PHASES",
    "PLAN_KINDS",
    "TIER_KINDS",
    "AutoBudget",
    "Choice",
    "CountedAllocations",
    "ElementBytes",
    "Finding",
    "FirstStep",
    "JsonlSink",
    "Lora",
    "Machine",
    "MemoryRow",
    "MemoryTracker",
    "Moment",
    "Moved",
    "OptimizerKind",
    "OutOfMemory",
    "ParameterSize",
    "Plan",
    "PlanSink",
    "PngSink",
    "Point",
    "Request",
    "Room",
    "RunPlan",
    "Sink",
    "StateBytes",
    "StepTime",
    "Walk",
    "WandbSink",
    "accelerate_yaml",
    "as_dict",
    "as_text",
    "auto_config",
    "bytes_per_parameter",
    "draw_comparison",
    "draw_plan",
    "draw_png",
    "explained_oom",
    "is_out_of_memory",
    "lightning_line",
    "model_states",
    "oom_report",
    "paper_bytes",
    "plan",
    "read_jsonl",
]
