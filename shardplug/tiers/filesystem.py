"""Which filesystem a folder is on, and how much room it has."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FULL", "Filesystem", "filesystem_of", "free_bytes", "room_at"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a system that has no room for what is written."""

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


def room_at(path: str | os.PathLike[str], *, ours: int = 0) -> str:
    """Say how much may be written at a path, like "1024 bytes free", for a message.

    Args:
        path: A file or folder, which need not exist.
        ours: Bytes there that count as free, as they go when the error is raised.
    """
    place = Path(path).absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        status = os.statvfs(place)
    except OSError:  # gone just now: the error that is explained is the one to be seen
        return "an unknown number of bytes free"
    words = f"{status.f_bavail * status.f_frsize + ours} bytes free"
    if status.f_files and not status.f_favail:
        words += ", and no inode for another file"
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        words += f", for files of at most {limit} bytes (ulimit -f)"
    return words
