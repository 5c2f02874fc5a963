"""Memory of sharded training: what it should be, what it is, and its curves."""

from shardplug.oom.oom_report import OutOfMemory, is_out_of_memory, oom_report
from shardplug.oom.watch import OomWatch, explained_oom
from shardplug.plan.auto import AutoBudget, auto_config
from shardplug.plan.choices import Choice, MemoryBudget
from shardplug.plan.lora import Lora
from shardplug.plan.plan import Plan, plan
from shardplug.plan.plan_report import accelerate_yaml, as_dict, as_text, lightning_line
from shardplug.plan.request import Request
from shardplug.plan.run.run_plan import FirstStep, RunPlan
from shardplug.plan.run.throughput import PEAK_TFLOPS
from shardplug.plan.sizes.model_states import (
    ElementBytes,
    Moment,
    ParameterSize,
    StateBytes,
    bytes_per_parameter,
    model_states,
    paper_bytes,
)
from shardplug.plan.sizes.optimizer_kinds import OPTIMIZERS, OptimizerKind
from shardplug.plan.step_time import Machine, StepTime
from shardplug.plan.timeline import PLAN_KINDS, MemoryTimeline, Moved, Point
from shardplug.process.counted import CountedAllocations
from shardplug.process.memory_row import KINDS, MODEL_STATE_KINDS, PHASES, TIER_KINDS, MemoryRow
from shardplug.tracking.alerts import Finding
from shardplug.tracking.comparison_picture import draw_comparison
from shardplug.tracking.picture import PngSink, draw_png
from shardplug.tracking.plan_picture import draw_plan
from shardplug.tracking.plan_sink import PlanSink
from shardplug.tracking.sinks import JsonlSink, Sink, read_jsonl
from shardplug.tracking.tracker import MemoryTracker
from shardplug.tracking.wandb_sink import WandbSink

__all__ = [
    "KINDS",
    "MODEL_STATE_KINDS",
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
    "MemoryBudget",
    "MemoryRow",
    "MemoryTimeline",
    "MemoryTracker",
    "Moment",
    "Moved",
    "OomWatch",
    "OptimizerKind",
    "OutOfMemory",
    "ParameterSize",
    "Plan",
    "PlanSink",
    "PngSink",
    "Point",
    "Request",
    "RunPlan",
    "Sink",
    "StateBytes",
    "StepTime",
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
