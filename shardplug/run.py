"""Run an unmodified Accelerate or Hugging Face Trainer script with shardplug's engine.

    accelerate launch --config_file zero3.yaml -m shardplug.run train.py --lr 1e-4

`accelerate.Accelerator` is replaced by `shardplug.accelerate.Accelerator` before the script
imports anything, and what Trainer saves and resumes with by ours; the script then runs as
`__main__` with its own arguments. A script that imports shardplug needs no `-m shardplug.run`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardplug.errors import ConfigError

__all__ = ["Script", "check_launch", "main"]

_USAGE = "accelerate launch --config_file zero3.yaml -m shardplug.run script.py [arguments]"


@dataclass(frozen=True, slots=True)
class Script:
    """What is to be run."""

    name: str
    """Path of the script, or name of the module."""

    arguments: tuple[str, ...]
    """The script's own arguments."""

    is_module: bool = False
    """Whether `name` is a module, as after `python -m`."""

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Script:
        """Read the command line behind `-m shardplug.run`.

        Raises:
            ConfigError: When no script is named or there is none at the path.
        """
        if not arguments:
            raise ConfigError(f"Expected the path of a script. Usage: {_USAGE}")
        if arguments[0] == "-m":
            if len(arguments) < 2:
                raise ConfigError(f"Expected a module name after -m. Usage: {_USAGE}")
            return cls(arguments[1], tuple(arguments[2:]), is_module=True)
        if not Path(arguments[0]).is_file():
            raise ConfigError(
                f"Expected a script, but {arguments[0]!r} is no file. Usage: {_USAGE}"
            )
        return cls(arguments[0], tuple(arguments[1:]))

    def run(self) -> None:
        """Run it as `__main__`, with its own arguments."""
        sys.argv = [self.name, *self.arguments]
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        # As `python script.py` does: the script's folder, not the current one, comes first.
        sys.path[0] = str(Path(self.name).resolve().parent)
        runpy.run_path(self.name, run_name="__main__")


def check_launch(environment: Mapping[str, str]) -> None:
    """Check what `accelerate launch` passed on.

    Args:
        environment: The process environment.

    Raises:
        ConfigError: When there was no launcher, or the YAML names no stage or a wrong one.
    """
    from shardplug.integrations.accelerate.launch_options import (
        ENVIRONMENT_NAME,
        PREFIX,
        LaunchOptions,
    )

    launched = environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not launched or "LOCAL_RANK" not in environment:
        raise ConfigError(
            "Expected to be started by `accelerate launch` with a YAML that says "
            f"distributed_type: FSDP. Usage: {_USAGE}"
        )
    if not environment.get(ENVIRONMENT_NAME, "").startswith(PREFIX):
        raise ConfigError(
            'Expected fsdp_sharding_strategy: "shardplug:zero3" under fsdp_config in the YAML, '
            f"got {environment.get(ENVIRONMENT_NAME)!r}."
        )
    LaunchOptions.read(None, environment)


def main(arguments: Sequence[str]) -> int:
    """Put the engine in place and run the script.

    Args:
        arguments: Path of the script, or "-m" and a module name; then the script's arguments.

    Returns:
        The exit code: 2, with a message, for a wrong command line or YAML.
    """
    try:
        script = Script.parse(arguments)
        check_launch(os.environ)
    except ConfigError as error:
        print(f"shardplug.run: {error}", file=sys.stderr)
        return 2
    # What is loaded already; the rest is replaced as it is imported.
    from shardplug.integrations.accelerate.hf_trainer.takeover import take_over

    take_over()
    script.run()
    _leave_process_group()
    return 0


def _leave_process_group() -> None:
    """Close the group in order: ranks that exit with it open may end with an abort."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
