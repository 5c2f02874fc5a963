"""Which filesystem a folder is on, and how much room it has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Filesystem", "filesystem_of", "free_bytes"]

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_NETWORK = frozenset(
    "nfs nfs4 cifs smb3 smbfs ceph lustre gpfs beegfs glusterfs afs 9p virtiofs fuse.sshfs "
    "fuse.s3fs fuse.gcsfuse fuse.juicefs fuse.glusterfs fuse.ceph-fuse".split()
)
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Filesystem:
    """What a folder is on."""

    kind: str
    """Name of the filesystem's type, like "ext4"; "unknown" where the system does not say."""

    @property
    def in_memory(self) -> bool:
        """Whether files there are kept in memory."""
        return self.kind in _MEMORY

    @property
    def over_network(self) -> bool:
        """Whether files there are on another machine."""
        return self.kind in _NETWORK


def filesystem_of(path: str | os.PathLike[str]) -> Filesystem:
    """Return the filesystem that an existing path is on."""
    place = Path(path).resolve()
    found, kind = "", "unknown"
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return Filesystem(kind)
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")  # spaces are written as \040
        inside = place == Path(mount) or Path(mount) in place.parents
        if inside and len(mount) >= len(found):  # of several on one place the last one counts
            found, kind = mount, right.split()[0]
    return Filesystem(kind)


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Return the bytes that this user may still write to a path's filesystem."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
