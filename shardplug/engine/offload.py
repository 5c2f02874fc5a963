"""The tiers of one engine: opening them, moving state to them, raising their errors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardplug.config import ZeroConfig

if TYPE_CHECKING:
    from shardplug.optim.streamed import StreamedOptimizer
    from shardplug.params import ParameterTier
    from shardplug.tiers import Tier

__all__ = ["Offload"]


class Offload:
    """State outside the device. Nothing is open where no option asks for it.

    Args:
        config: Says what is offloaded, and where to.
        device: The engine's.
        control: All ranks, with messages on the CPU.

    Raises:
        ConfigError: On every rank, when a tier cannot be opened on one. Collective for that.
    """

    def __init__(
        self, config: ZeroConfig, device: torch.device, control: dist.ProcessGroup
    ) -> None:
        self._config = config
        self._device = device
        self._control = control
        self._streamed: weakref.WeakKeyDictionary[torch.optim.Optimizer, StreamedOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self.optimizer_tier: Tier | None = None
        if config.offload_optimizer != "none":
            self.optimizer_tier = self._open(config.offload_optimizer, "offload_optimizer")
        self.parameter_tier: ParameterTier | None = None
        if config.offload_params == "nvme":
            self.parameter_tier = self._open_parameter_tier()

    def _open(self, name: str, option: str) -> Tier:
        from shardplug.tiers import open_tier

        return open_tier(
            name,
            self._config.nvme_path,
            self._control,
            pinned=self._device.type != "cpu",
            what=option,
            cpu_bytes=int((self._config.offload_cpu_gib or 0) * 2**30),
        )

    def _open_parameter_tier(self) -> ParameterTier:
        from shardplug.params import ParameterTier
        from shardplug.tiers.disk import DiskTier
        from shardplug.tiers.split import SplitTier

        opened = self.optimizer_tier
        tier = opened.far if isinstance(opened, SplitTier) else opened
        if not isinstance(tier, DiskTier):  # optimizer state is elsewhere
            tier = self._open("nvme", "offload_params")
            assert isinstance(tier, DiskTier)
        return ParameterTier(tier, self._config.prefetch, self._control)

    @property
    def tiers(self) -> list[Tier]:
        """All that are open."""
        tiers = [] if self.optimizer_tier is None else [self.optimizer_tier]
        if self.parameter_tier is not None and not any(
            tier.uses(self.parameter_tier.tier) for tier in tiers
        ):
            tiers.append(self.parameter_tier.tier)
        return tiers

    # ---------------------------------------------------------------- parameters

    def move_units(self, root: nn.Module) -> None:
        """Move the shards of all units of a model to where they rest. Collective."""
        for unit in root.modules():
            if isinstance(unit, FSDPModule):
                self.move_unit(unit)
        self.raise_errors("Moving parameters to files")

    def move_unit(self, unit: nn.Module) -> None:
        """Move the shards of one unit to where they rest; those that are there stay."""
        if self.parameter_tier is not None:
            self.parameter_tier.offload_unit(unit, self._device)

    def raise_errors(self, doing: str) -> None:
        """Raise, on every rank, any error recorded since the last call. Collective.

        Args:
            doing: What a message says has failed, like "The forward".
        """
        if self.parameter_tier is not None:
            self.parameter_tier.raise_failure(doing)

    def reset(self) -> None:
        """Return to rest after an exception in a forward or backward."""
        if self.parameter_tier is not None:
            self.parameter_tier.reset()

    def close(self) -> None:
        """Close the tiers, and remove their files."""
        for tier in self.tiers:
            tier.close()

    # ---------------------------------------------------------------- optimizers

    def stream(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer's state live in the tier. Collective.

        Raises:
            OptimizerError: When its class cannot be run block by block.
            StorageError: On every rank, when there is too little room on one.
        """
        from shardplug.optim.streamed import StreamedOptimizer

        assert self.optimizer_tier is not None
        self._streamed[optimizer] = StreamedOptimizer(
            optimizer, self.optimizer_tier, self._control, self.parameter_tier
        )

    def streamed(self, optimizer: torch.optim.Optimizer) -> StreamedOptimizer | None:
        """Return what steps an optimizer whose state lives in the tier."""
        return self._streamed.get(optimizer)

    def all_streamed(self) -> Iterator[StreamedOptimizer]:
        """Iterate over those of all optimizers that are alive."""
        return iter(list(self._streamed.values()))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count what the parameters' tier has moved for a step that has ended."""
        if self.parameter_tier is not None:
            self.parameter_tier.after_step(self._streamed[optimizer].last_step)
