"""The configuration of a sharded run: which stage, which tiers, which units."""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardplug.errors import ConfigError

__all__ = ["PRESETS", "Tier", "ZeroConfig"]

Tier = Literal["none", "cpu", "nvme"]

_PRESETS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1_cpu": {"stage": 1, "offload_optimizer": "cpu"},
    "zero2_cpu": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_cpu": {"stage": 3, "offload_optimizer": "cpu"},
    "zero3_infinity": {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme"},
}
_PRESETS["zero2_offload"] = _PRESETS["zero2_cpu"]
_PRESETS["zero3_offload"] = _PRESETS["zero3_cpu"]

PRESETS: tuple[str, ...] = tuple(_PRESETS)
"""Names known to `ZeroConfig.preset` and as strategy strings."""

_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How a model is sharded over its data-parallel ranks.

    Every field is checked when the object is made; nothing is read from the environment.

    Raises:
        ConfigError: For a value that is impossible or unknown.
    """

    stage: Literal[1, 2, 3] = 3
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters."""

    offload_optimizer: Tier = "none"
    """Where optimizer state lives: on the device ("none"), in CPU memory, or in files ("nvme")."""

    offload_params: Tier = "none"
    """Where parameter shards and gradients live between uses, at stage 3: as above."""

    nvme_path: str | None = None
    """Folder for swap files of the "nvme" tier; None leaves it to SHARDPLUG_NVME_PATH."""

    offload_cpu_gib: float | None = None
    """With "nvme": GiB of CPU memory a rank's optimizer state fills before files; None is none."""

    replicate_size: int = 1
    """HSDP: number of replicas; the world size must be a multiple. 1 shards over all ranks."""

    units: Literal["auto"] | tuple[str, ...] = "auto"
    """Modules gathered together: "auto", or class names; () makes the whole model one unit."""

    param_dtype: torch.dtype | str | None = None
    """dtype of the gathered parameters and of the computation; None keeps the parameters' own."""

    reduce_dtype: torch.dtype | str | None = None
    """dtype gradients are reduced in; None is fp32 where `param_dtype` is lower, else its own."""

    activation_checkpointing: bool = False
    """Recompute the activations of each repeated unit in the backward."""

    offload_activations: Literal["none", "cpu"] = "none"
    """Where activations wait for the backward; with `activation_checkpointing` units' inputs."""

    prefetch: int = 1
    """Units gathered, and their activations brought back, ahead of use; 0 waits for the use."""

    watchdog: Literal["end", "report", "off"] = "end"
    """What happens when a rank is lost: the job ends on all ranks, it is logged, or nothing."""

    silence_seconds: float = 20.0
    """The watchdog's limit for a rank that is stopped, or silent on another machine."""

    stall_seconds: float | None = None
    """Its limit for ranks that live but end no forward, backward or step; None is no limit."""

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (1, 2, 3):
            raise ConfigError(f"Expected stage 1, 2 or 3, got {self.stage!r}.")
        for name in ("offload_optimizer", "offload_params"):
            tier = getattr(self, name)
            if tier not in ("none", "cpu", "nvme"):
                raise ConfigError(f'Expected {name} "none", "cpu" or "nvme", got {tier!r}.')
        away: object = self.offload_activations
        if away not in ("none", "cpu"):
            why = 'write "cpu" to keep them in CPU memory.'
            if away == "nvme":
                why = "what each forward writes and each backward reads is too much for files."
            raise ConfigError(f'Expected offload_activations "none" or "cpu", got {away!r}: {why}')
        if self.offload_params != "none":
            if self.stage != 3:
                raise ConfigError(
                    f"Expected stage 3 with offload_params={self.offload_params!r}, got stage "
                    f"{self.stage}, which holds whole parameters from the first forward of a "
                    "window to its last backward. Use stage=3, or offload_optimizer alone."
                )
            if self.offload_optimizer == "none":
                raise ConfigError(
                    f"Expected offload_optimizer too with offload_params={self.offload_params!r}, "
                    "as the optimizer's state is larger than the parameters and is made where "
                    'they are. Set offload_optimizer to "cpu" or "nvme".'
                )
        if self.nvme_path is not None and "nvme" not in (
            self.offload_optimizer,
            self.offload_params,
        ):
            raise ConfigError(
                f"nvme_path={self.nvme_path!r} has no effect with "
                f"offload_optimizer={self.offload_optimizer!r} and "
                f"offload_params={self.offload_params!r}: no state lives in files. Set one to "
                '"nvme", or leave nvme_path out.'
            )
        self._check_cpu_budget()
        if isinstance(self.nvme_path, os.PathLike):
            object.__setattr__(self, "nvme_path", os.fspath(self.nvme_path))
        if self.nvme_path is not None and not (
            isinstance(self.nvme_path, str) and self.nvme_path.strip()
        ):
            raise ConfigError(f"Expected nvme_path to name a folder, got {self.nvme_path!r}.")
        for name, least in (("replicate_size", 1), ("prefetch", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"Expected {name} to be an integer >= {least}, got {value!r}.")
        if not isinstance(self.activation_checkpointing, bool):
            raise ConfigError(
                "Expected activation_checkpointing to be true or false, "
                f"got {self.activation_checkpointing!r}."
            )
        self._check_watchdog()
        if self.units != "auto":
            if isinstance(self.units, str):
                raise ConfigError(
                    'Expected units "auto" or a sequence of class names, '
                    f"got the string {self.units!r}; write ({self.units!r},)."
                )
            names = tuple(self.units)
            if not all(isinstance(name, str) and name for name in names):
                raise ConfigError(f"Expected units to hold class names, got {self.units!r}.")
            object.__setattr__(self, "units", names)
        for name in ("param_dtype", "reduce_dtype"):
            object.__setattr__(self, name, _as_dtype(name, getattr(self, name)))

    def _check_cpu_budget(self) -> None:
        budget = self.offload_cpu_gib
        if budget is None:
            return
        number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
        if not number or not 0 <= budget < math.inf:
            raise ConfigError(
                f"Expected offload_cpu_gib to be a number of GiB of at least 0, got {budget!r}."
            )
        if self.offload_optimizer != "nvme":
            raise ConfigError(
                f"offload_cpu_gib={budget!r} has no effect with "
                f"offload_optimizer={self.offload_optimizer!r}: it says how much of what would be "
                'in files stays in CPU memory. Set offload_optimizer="nvme", or leave it out.'
            )

    def _check_watchdog(self) -> None:
        kind: object = self.watchdog
        if kind not in ("end", "report", "off"):
            raise ConfigError(f'Expected watchdog "end", "report" or "off", got {kind!r}.')
        for name in ("silence_seconds", "stall_seconds"):
            value = getattr(self, name)
            if value is None and name == "stall_seconds":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 2 <= value < math.inf:
                raise ConfigError(f"Expected {name} of 2 seconds or more, got {value!r}.")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ZeroConfig:
        """Build the configuration behind a strategy string.

        Args:
            name: One of `PRESETS`, in any case.
            **overrides: Fields that replace the preset's.

        Raises:
            ConfigError: For an unknown name or field.
        """
        return cls.from_fields({**_preset(name), **overrides})

    @classmethod
    def from_fields(cls, fields: typing.Mapping[str, Any]) -> ZeroConfig:
        """Build a configuration from a mapping, refusing unknown names.

        Raises:
            ConfigError: For a name that is not a field, or an impossible value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ConfigError(
                f"Expected options out of {', '.join(known)}, got {', '.join(unknown)}."
            )
        return cls(**fields)

    @classmethod
    def parse(cls, text: str) -> ZeroConfig:
        """Read a configuration written in one line.

        The form is a preset (``"zero3"``), options (``"stage=2,replicate_size=2"``) or a preset
        followed by options (``"zero3,units=LlamaDecoderLayer+MyBlock"``).

        Raises:
            ConfigError: For text of another form, an unknown option or an impossible value.
        """
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise ConfigError(
                'Expected a preset like "zero3" or options like "stage=3,prefetch=1", '
                f"got {text!r}."
            )
        fields: dict[str, Any] = {}
        if "=" not in parts[0]:
            fields.update(_preset(parts[0]))
            parts = parts[1:]
        for part in parts:
            name, equals, value = part.partition("=")
            if not equals:
                raise ConfigError(f"Expected option=value, got {part!r} in {text!r}.")
            if name.strip() in fields and name.strip() != "stage":
                raise ConfigError(f"Option {name.strip()!r} is given twice in {text!r}.")
            fields[name.strip()] = _parse_value(name.strip(), value.strip())
        return cls.from_fields(fields)


def _preset(name: str) -> dict[str, Any]:
    fields = _PRESETS.get(name.lower())
    if name.lower() == "zero_auto":
        raise ConfigError(
            "zero_auto is decided when the model is known: use it as the strategy of a Trainer or "
            'of Fabric, as "shardplug:zero_auto" in the YAML of Accelerate, or call '
            "shardplug.memory.auto_config."
        )
    if fields is None:
        raise ConfigError(f"Expected a preset out of {', '.join(_PRESETS)}, got {name!r}.")
    return fields


def _as_dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(value, str):
        found = _DTYPES.get(value.lower())
        if found is None:
            raise ConfigError(f"Expected {name} out of {', '.join(_DTYPES)}, got {value!r}.")
        return found
    if value is not None and value not in _DTYPES.values():
        raise ConfigError(f"Expected {name} to be bf16, fp16 or fp32, got {value!r}.")
    return value


def _parse_value(name: str, text: str) -> Any:
    hints = typing.get_type_hints(ZeroConfig)
    hint = hints.get(name)
    if hint is None:
        return text  # from_fields names the unknown option
    if name == "units":
        return text if text == "auto" else tuple(part for part in text.split("+") if part)
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"Expected {name} to be true or false, got {text!r}.")
        return text.lower() == "true"
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and text.lower() != "none":
        try:
            return float(text)
        except ValueError as error:
            raise ConfigError(f"Expected {name} to be a number, got {text!r}.") from error
    if hint is int or name == "stage":
        try:
            return int(text)
        except ValueError as error:
            raise ConfigError(f"Expected {name} to be an integer, got {text!r}.") from error
    return None if text.lower() == "none" and type(None) in kinds else text
