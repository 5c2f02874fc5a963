"""Write the weights of a checkpoint as a Hugging Face folder.

CHECKPOINT is a checkpoint of shardplug, a plain torch.distributed.checkpoint folder, or a folder
of safetensors. OUT then has what `save_pretrained` writes, in bounded memory and without ranks;
of a model with PEFT adapters, the adapters.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from shardplug.checkpoint.export.exporting import export_checkpoint
from shardplug.checkpoint.format.commit import locate
from shardplug.checkpoint.read.inspection import inspect

__all__ = ["add_arguments", "run"]

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the folder to read")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--dtype",
        default="source",
        choices=("source", "float32", "bfloat16", "float16", "float64"),
        help="of the weights; source: what each came in (default)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="of one file, like 500MB (default: 5GB)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="where the tokenizer's files are"
    )
    parser.add_argument(
        "--module", metavar="PREFIX", help="which part of the model, by its names, like llama"
    )
    parser.add_argument(
        "--adapter-only", action="store_true", help="fail where there are no PEFT adapters"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an older export")


def run(arguments: argparse.Namespace) -> int:
    """Export, and return the exit code."""
    if not locate(arguments.checkpoint).exists():
        print(f"shardplug: there is nothing at {arguments.checkpoint}", file=sys.stderr)
        return 2
    info = inspect(arguments.checkpoint)
    if not info.loads:
        print(
            f"shardplug: {arguments.checkpoint} is {info.description}. {info.advice}",
            file=sys.stderr,
        )
        return 1 if info.health == "unfinished" else 2
    done = export_checkpoint(
        arguments.checkpoint,
        arguments.out,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_size,
        module=arguments.module,
        tokenizer=arguments.tokenizer,
        adapter_only=arguments.adapter_only,
        overwrite=arguments.overwrite,
    )
    what = "a PEFT adapter" if done.is_adapter else "the weights"
    print(f"{done.path}: {what}, {len(done.files)} files, {done.num_bytes:,} bytes")
    for file in done.files:
        print(f"  {file}")
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a size like 5GB or 500MiB, got {text!r}")
    return max(1, int(float(match[1]) * _UNITS[match[2]]))
