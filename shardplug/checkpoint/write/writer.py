"""Writes a checkpoint folder: aside first, manifest last, then one rename."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from shardplug.checkpoint.format.commit import MANIFEST, StagingFolder, new_id
from shardplug.checkpoint.format.durable import (
    BLOCK_BYTES,
    SummingFileSystem,
    bytes_of,
    file_checksums,
    is_full,
    naming,
    sync,
)
from shardplug.checkpoint.format.manifest import (
    RANK_BYTES,
    check_described,
    describe,
    optimizer_key,
    rank_key,
    state_key,
    to_json,
)
from shardplug.checkpoint.read.stored_tensors import META, PARAM_GROUPS
from shardplug.checkpoint.state.planners import SavePlanner
from shardplug.checkpoint.state.rank_rng import rng_state
from shardplug.checkpoint.write.save_checks import (
    check_agreement,
    check_content,
    check_readable,
    extra_state_by_rank,
)
from shardplug.checkpoint.write.snapshot import Snapshot, SnapshotMemory, SnapshotPlanner
from shardplug.collective import (
    from_rank_0,
    gather,
    message_group,
    rank_and_size,
    together,
)
from shardplug.core._torch.dcp import save_tensors
from shardplug.errors import CheckpointError
from shardplug.tiers.filesystem import room_at

if TYPE_CHECKING:
    from shardplug.checkpoint.write.background import Background

__all__ = ["PARAM_GROUPS", "CheckpointWrite", "write"]

_SAVING = "Saving"

T = TypeVar("T")


def write(
    path: str | os.PathLike[str],
    *,
    models: Sequence[Mapping[str, torch.Tensor]],
    optimizers: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any],
    run: Mapping[str, Any] | None = None,
    modules: Sequence[nn.Module] = (),
    side_files: Callable[[Path], None] | None = None,
    background: Background | None = None,
) -> None:
    """Write one checkpoint. Collective; all ranks succeed or all raise.

    Tensors that are whole on every rank (buffers, counters) are taken from rank 0. Extra state of
    modules that differs between ranks is kept for each.

    Args:
        path: The folder to make; rank 0's counts. A checkpoint there is replaced; another
            non-empty folder, or a file, is not. A link there is replaced by the new folder; what
            it points to stays.
        models: For each model its tensors by name (see `state_of_model`).
        optimizers: For each optimizer its state by name (see `state_of_optimizer`).
        meta: What else to keep, made of plain types and tensors; rank 0's counts.
        run: Facts about the run for the manifest, made of plain types (stage, framework, step).
        modules: The models themselves, in the order of `models`: the dtypes they came in and
            their Hugging Face configurations are kept for an export.
        side_files: Called on every rank with the folder being written, to add files to it.
        background: Copy the tensors and return; it writes them while training goes on.

    Raises:
        CheckpointError: On every rank, naming the first rank that failed and why. What was at
            `path` is still there then, and nothing else is left behind. With `background` also
            for a save before this one that failed.
    """
    if background is not None:
        background.prepare()
    run = {"world_size": rank_and_size()[1], **(run or {})}
    draft = CheckpointWrite(*_agree_on_path(path), models, optimizers)
    memory = None if background is None else background.memory
    draft.begin(meta, run, modules, side_files, memory)
    if background is None:
        draft.finish()
    else:
        background.start(draft)


def _agree_on_path(path: str | os.PathLike[str]) -> tuple[Path, str]:
    def absolute() -> str:
        target = Path(path).expanduser().absolute()
        if not target.name:
            raise CheckpointError(f"Expected the path of a folder to make, got {target}.")
        return str(target)

    target, save_id = from_rank_0((together(absolute, _SAVING), new_id()))
    return Path(target), save_id


class CheckpointWrite:
    """A checkpoint that is being written.

    Args:
        target: Where it will be.
        save_id: The same on every rank.
        models: As in `write`.
        optimizers: As in `write`.
    """

    def __init__(
        self,
        target: Path,
        save_id: str,
        models: Sequence[Mapping[str, torch.Tensor]],
        optimizers: Sequence[Mapping[str, Any]],
    ) -> None:
        self._rank, self._size = rank_and_size()  # also when the process group is gone
        self._snapshot: Snapshot | None = None
        self._aside = StagingFolder(target, save_id)
        self._models = models
        self._optimizers = optimizers
        self._manifest: dict[str, Any] = {}
        self._files: dict[str, dict[str, Any]] = {}
        self._by_rank: Sequence[Mapping[str, Sequence[int]]] = ()

    @property
    def target(self) -> Path:
        """Where the checkpoint will be."""
        return self._aside.target

    def begin(
        self,
        meta: Mapping[str, Any],
        run: Mapping[str, Any],
        modules: Sequence[nn.Module],
        side_files: Callable[[Path], None] | None,
        memory: SnapshotMemory | None,
    ) -> None:
        """Check everything, write all but the tensors, and copy those to `memory`. Collective.

        Raises:
            CheckpointError: On every rank, as `write`.
        """
        whole = {**meta, PARAM_GROUPS: [_besides_tensors(o) for o in self._optimizers]}

        def check() -> None:
            check_content(self._optimizers)
            self._manifest = describe(self._models, self._optimizers, run, modules)
            if self._rank == 0:
                check_readable(whole)
                check_described(self._manifest)

        self._together(check)
        check_agreement(self._models, self._optimizers)
        self._by_rank = extra_state_by_rank(self._models)
        for entries, sizes in zip(self._manifest["models"], self._by_rank, strict=True):
            for name, size in sizes.items():
                entries[name][RANK_BYTES] = size
        with self._discarding():
            self._together(lambda: self._aside.open() if self._rank == 0 else None)
            self._together(lambda: self._write_rest(whole, side_files))
            if memory is not None:
                self._snapshot = self._together(lambda: Snapshot(self._tensors(), memory))

    def finish(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the tensors and publish the folder. Collective.

        Args:
            group: The group to talk on, where it is not `message_group`'s.

        Raises:
            CheckpointError: On every rank, as `write`.
        """
        group = group or message_group()
        with self._discarding():
            self._together(lambda: self._write_tensors(group), group)
            files = self._collect_files(group)
            self._together(lambda: self._publish(files), group)

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._rank == 0:
                self._aside.discard()
            raise

    def _together(self, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        return together(action, _SAVING, group=group, explain=self._room)

    def _room(self, error: BaseException) -> str:
        """Say what the save needs and what there is, after an error of a drive that is full."""
        if not is_full(error):
            return ""
        sizes = (
            value.numel() * value.element_size()
            for values in (*self._models, *_states(self._optimizers))
            for value in values.values()
            if isinstance(value, torch.Tensor)
        )
        folder = self._aside.folder
        ours = bytes_of(folder.rglob("*"))  # of all ranks; removed when this is raised
        return (
            f". The tensors of the checkpoint take {sum(sizes)} bytes; {self.target.parent} has "
            f"{room_at(folder, ours=ours)}."
        )

    def _write_rest(
        self, meta: Mapping[str, Any], side_files: Callable[[Path], None] | None
    ) -> None:
        folder, rank = self._aside.folder, self._rank
        before = set(folder.rglob("*"))
        _save(rng_state(), folder / f"rng_{rank}.pt")
        if rank == 0:
            _save(dict(meta), folder / META)
        if side_files is not None:
            with naming(folder):
                side_files(folder)
        for path in set(folder.rglob("*")) - before:
            with suppress(FileNotFoundError):  # another rank's, which it has renamed meanwhile
                sync(path)

    def _tensors(self) -> dict[str, Any]:
        """Return this rank's tensors as they are given to DCP."""
        rank = self._rank

        def mine(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
            # torch would spread whole tensors over the ranks; buffers may differ between them.
            return {
                key: value
                for key, value in values.items()
                if isinstance(value, DTensor) or (rank == 0 and isinstance(value, torch.Tensor))
            }

        tensors: dict[str, Any] = {state_key(i): mine(m) for i, m in enumerate(self._models)}
        for index, optimizer in enumerate(self._optimizers):
            tensors[optimizer_key(index)] = {
                "state": {name: mine(values) for name, values in optimizer["state"].items()}
            }
        if rank:
            for index, names in enumerate(self._by_rank):
                model = self._models[index]
                own = {name: model[name] for name in names}
                tensors[rank_key(rank, state_key(index))] = own
        return tensors

    def _write_tensors(self, group: dist.ProcessGroup | None) -> None:
        writer = FileSystemWriter(self._aside.folder)
        writer.fs = files = SummingFileSystem()
        save_tensors(
            self._tensors(),
            storage_writer=writer,
            planner=SavePlanner() if self._snapshot is None else SnapshotPlanner(self._snapshot),
            process_group=group,
            no_dist=self._size == 1,
        )
        # torch writes the metadata under another name and renames it.
        self._files = {name.removesuffix(".tmp"): entry for name, entry in files.entries.items()}

    def _collect_files(self, group: dist.ProcessGroup | None) -> dict[str, dict[str, Any]]:
        """Return what every rank wrote. Collective."""
        everyone = gather(self._files, _SAVING, group)
        return {name: entry for files in everyone for name, entry in files.items()}

    def _publish(self, files: Mapping[str, dict[str, Any]]) -> None:
        if self._rank:
            return
        folder = self._aside.folder
        listed: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                listed[name] = files.get(name) or file_checksums(path)
                size = path.stat().st_size
                if size != listed[name]["bytes"]:
                    raise CheckpointError(
                        f"Expected {path} to have the {listed[name]['bytes']} bytes that were "
                        f"written, found {size}."
                    )
        missing = sorted(set(files) - set(listed))
        if missing:
            raise CheckpointError(
                f"Expected {folder} to be one folder that every rank sees, but rank 0 does not "
                f"find {missing[0]}. Save to a file system that all nodes share."
            )
        manifest = {**self._manifest, "block_bytes": BLOCK_BYTES, "files": listed}
        draft = folder / f"{MANIFEST}.tmp"
        with naming(draft), draft.open("w", encoding="utf-8") as file:
            file.write(to_json(manifest))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(folder / MANIFEST)
        self._aside.publish()


def _save(value: Any, path: Path) -> None:
    """Save as `torch.save` does; an error of the drive is the system's, with the path."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with naming(path), path.open("wb") as file:
        file.write(buffer.getbuffer())


def _states(optimizers: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for optimizer in optimizers:
        yield from optimizer["state"].values()


def _besides_tensors(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "class": optimizer.get("class"),
        "param_groups": list(optimizer["param_groups"]),
        "plain_state": {
            name: {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
            for name, values in optimizer["state"].items()
        },
    }
