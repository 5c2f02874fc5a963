"""One checkpoint format for every stage, world size and framework.

A checkpoint is a folder: the tensors in torch's distributed checkpoint (DCP) format under their
names, `meta.pt` with what is not a tensor, one `rng_<rank>.pt` a rank, and `manifest.json`,
written last, that lists what is inside with checksums. The folder is written aside and renamed.
"""

from shardplug.checkpoint.export.exporting import export
from shardplug.checkpoint.export.exporting_live import export_model
from shardplug.checkpoint.read.inspection import CheckpointInfo, inspect
from shardplug.checkpoint.read.reader import Reader, is_checkpoint
from shardplug.checkpoint.read.resume import ResumePoint, resume_point
from shardplug.checkpoint.state.model_state import load_model, state_of_model
from shardplug.checkpoint.state.optimizer_state import load_optimizer, state_of_optimizer
from shardplug.checkpoint.write.writer import write
from shardplug.collective import together

__all__ = [
    "CheckpointInfo",
    "Reader",
    "ResumePoint",
    "export",
    "export_model",
    "inspect",
    "is_checkpoint",
    "load_model",
    "load_optimizer",
    "resume_point",
    "state_of_model",
    "state_of_optimizer",
    "together",
    "write",
]
