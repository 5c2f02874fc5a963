"""How long a step should take: compute, collectives, transfers to host and disk.

The figures rank choices; they are no promise. Compute, collectives and the transfers of activations
are taken to overlap, but for a fifth of the shorter ones; transfers of an offloaded optimizer come
on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardplug.errors import ConfigError
from shardplug.plan.timeline import Moved

__all__ = ["Machine", "StepTime"]

_GB = 1e9
_NOT_HIDDEN = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Speeds of the machine; the defaults are those of a node of A100s, used at 40 %.

    Raises:
        ConfigError: For a speed that is not above 0.
    """

    tflops: float = 125.0
    """Floating point operations per second and device that training reaches, in 10^12."""

    link_gb_s: float = 200.0
    """GB per second that a device sends to others of its node."""

    node_link_gb_s: float = 20.0
    """GB per second that a device sends to other nodes."""

    host_gb_s: float = 20.0
    """GB per second between a device and host memory."""

    nvme_gb_s: float = 5.0
    """GB per second between a node and its NVMe disks, shared by its devices."""

    def __post_init__(self) -> None:
        for name in ("tflops", "link_gb_s", "node_link_gb_s", "host_gb_s", "nvme_gb_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(f"Expected {name} above 0, got {value!r}.")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of one optimizer step, by what takes them."""

    compute: float
    collectives: float
    transfers: float
    """Between device, host and disk."""
    activations: float = 0.0
    """Of activations between device and host."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        *shorter, longest = sorted((self.compute, self.collectives, self.activations))
        return longest + _NOT_HIDDEN * sum(shorter) + self.transfers

    @classmethod
    def of(
        cls,
        machine: Machine,
        *,
        flops: int,
        moved: Moved,
        host_bytes: int,
        disk_bytes: int,
        crosses_nodes: bool,
        devices: int,
        activation_bytes: int = 0,
    ) -> StepTime:
        """Predict a step.

        Args:
            machine: Speeds.
            flops: Operations of one device in all micro-batches.
            moved: Bytes one rank sends.
            host_bytes: Bytes between one device and its host.
            disk_bytes: Bytes between one rank and the disk.
            crosses_nodes: Whether shards lie on several nodes.
            devices: Devices of a node, which share its disk.
            activation_bytes: Bytes of activations between one device and its host.
        """
        link = machine.node_link_gb_s if crosses_nodes else machine.link_gb_s
        sent = (moved.gathers + moved.reductions) / link + moved.replicas / machine.node_link_gb_s
        transfers = host_bytes / machine.host_gb_s + disk_bytes * devices / machine.nvme_gb_s
        activations = activation_bytes / machine.host_gb_s / _GB
        return cls(flops / (machine.tflops * 1e12), sent / _GB, transfers / _GB, activations)
