"""The `shardplug` command.

Every module of this package is a subcommand of its name: the first line of its docstring is its
help, `add_arguments(parser)` declares its options, and `run(arguments)` returns the exit code.
0: done. 1: the answer is no (damaged, does not fit). 2: bad use (bad options, not a checkpoint).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from shardplug import __version__, _undistributed, errors

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the command's name; None takes the process's own.

    Returns:
        The exit code. Expected failures are one line on stderr.
    """
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # `shardplug inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (errors.ShardplugError, OSError) as error:
        print(f"shardplug: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, errors.ConfigError) else 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardplug",
        description="Sharded training (ZeRO) on PyTorch: plan memory before a run, measure "
        "drive and memory, look into checkpoints, export weights.",
        epilog="Exit codes: 0 done, 1 the answer is no, 2 bad use.",
    )
    parser.add_argument("--version", action="version", version=f"shardplug {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        module = _command(name)
        help_line, _, description = str(module.__doc__).partition("\n")
        command = commands.add_parser(
            name,
            help=help_line,
            description=f"{help_line}\n{description}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _command(name: str) -> Any:
    """Import a subcommand; its docstring alone where torch has no torch.distributed."""
    if dist.is_available():
        return importlib.import_module(f"{__name__}.{name}")
    source = (Path(__file__).parent / f"{name}.py").read_text()
    return SimpleNamespace(
        __doc__=ast.get_docstring(ast.parse(source)),
        add_arguments=lambda parser: parser.add_argument("rest", nargs=argparse.REMAINDER),
        run=_without_distributed,
    )


def _without_distributed(arguments: argparse.Namespace) -> int:
    raise errors.ConfigError(_undistributed.MISSING)
