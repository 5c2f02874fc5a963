"""Ranks, launcher and process group of a strategy, the same for Trainer and Fabric."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from shardplug import watchdog
from shardplug._messages import show_messages
from shardplug.config import ZeroConfig
from shardplug.engine import ZeroEngine
from shardplug.errors import ConfigError
from shardplug.integrations.common import comm, namespace
from shardplug.plan.auto import AutoBudget
from shardplug.plan.run.announce import Announcement

__all__ = ["ProcessGroupMixin"]


class ProcessGroupMixin:
    """Mixed into a framework's ParallelStrategy, which provides the attributes declared here."""

    parallel_devices: list[torch.device] | None
    cluster_environment: Any
    _launcher: Any

    _namespace: str
    """Import name that the class was made for."""

    config: ZeroConfig
    """The options; the engine's adds what the framework's precision says."""

    def _join(
        self,
        config: ZeroConfig,
        backend: str | None,
        timeout: timedelta,
        budget: AutoBudget | None = None,
    ) -> None:
        """Store the options; nothing is set up yet."""
        self.config = config
        self._budget = budget
        self.num_nodes = 1
        self.process_group_backend = backend
        self._timeout = timeout
        self._meeting = comm.Meeting(timeout)
        self._engine: ZeroEngine | None = None
        self._announcement: Announcement | None = None
        self._in_window = False

    @property
    def engine(self) -> ZeroEngine:
        """The engine that shards the module.

        Raises:
            ConfigError: Before a module is sharded.
        """
        if self._engine is None:
            raise ConfigError(
                f"Expected {type(self).__name__}.engine to be read after a module was set up "
                "(in a Trainer, from on_fit_start on; in Fabric, after setup); there is none yet."
            )
        return self._engine

    def gathered(
        self,
        module: nn.Module | None = None,
        *,
        modify: bool = False,
        src: int | None = None,
        grad: bool = False,
    ) -> AbstractContextManager[None]:
        """Hold parameters whole, to generate, evaluate or change them. Collective.

            with self.trainer.strategy.gathered(self.language_model):  # fabric.strategy in Fabric
                tokens = self.language_model.generate(prompts)

        Ranks may generate texts of different lengths inside, or none. With `modify` whole master
        weights can be changed inside; at the end every rank's shards and tiers have the new values.

        Args:
            module: The module, or one in it; None means all that is sharded.
            modify: Whether parameters are changed.
            src: With `modify`, the rank whose values count on all ranks; None means that every
                rank makes the same changes.
            grad: Record gradients, for losses that are made of the parameters.

        Returns:
            A context; see `ZeroEngine.gathered`.
        """
        return self.engine.gathered(module, modify=modify, src=src, grad=grad)

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        assert self.parallel_devices is not None
        local_rank: int = self.cluster_environment.local_rank()
        return self.parallel_devices[local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a DistributedSampler is made with."""
        environment = self.cluster_environment
        return {"num_replicas": environment.world_size(), "rank": environment.global_rank()}

    def _assign_ranks(self, rank_zero_modules: tuple[str, ...]) -> None:
        """Tell the cluster environment and the rank-zero helpers this process's rank."""
        environment = self.cluster_environment
        if environment is None:
            return
        rank = comm.assign_ranks(
            environment,
            node_rank=environment.node_rank(),
            local_rank=environment.local_rank(),
            num_nodes=self.num_nodes,
            num_processes=self.num_processes,
        )
        for module in rank_zero_modules:
            namespace.lookup(self._namespace, module, "rank_zero_only").rank = rank

    def _configure_launcher(self) -> None:
        # Always, also where the processes exist already: it is the launcher that compares the
        # number of devices with the number of processes.
        launcher = namespace.lookup(
            self._namespace, "strategies.launchers", "_SubprocessScriptLauncher"
        )
        self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _connect(self) -> None:
        comm.connect(
            self.cluster_environment,
            device=self.root_device,
            backend=self.process_group_backend,
            timeout=self._timeout,
        )
        self._meeting.prepare()
        show_messages()
        watchdog.start(self.config)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        comm.barrier(self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank."""
        return comm.broadcast(obj, src)
