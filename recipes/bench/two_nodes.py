"""Two nodes on one machine: network namespaces, and a link between them that is slow or far.

Nothing here has a name in the system. A namespace lives as long as a process in it, each is held
by a `cat` that ends with this process, and the devices go with the namespaces: nothing is left
behind, however this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICE = "link0"
"""The device of the link, in both namespaces."""

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_MTU = 9000
_BUFFERED_SECONDS = 0.4  # of data that wait for the link before packets are dropped
_TUNSETIFF, _TUN_WITHOUT_HEADER, _NEW_NETWORK = 0x400454CA, 0x1001, 0x40000000


class Unavailable(Exception):
    """Why namespaces cannot be made here."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a link does to packets, in each direction."""

    name: str
    megabits: float | None = None
    """Bandwidth in 10^6 bits per second; None is not limited."""

    delay: float = 0.0
    """Seconds that a packet takes."""


class Nodes:
    """Two namespaces and the link between them.

    Args:
        holders: Processes that live in the two namespaces.
        limited_by: What limits the link, for the report.
    """

    def __init__(self, holders: Sequence[subprocess.Popen[bytes]], limited_by: str) -> None:
        self._holders = holders
        self.limited_by = limited_by

    def inside(self, node: int) -> list[str]:
        """Return the beginning of a command line that runs in a node."""
        return _inside(self._holders[node])


def _inside(holder: subprocess.Popen[bytes]) -> list[str]:
    return ["nsenter", f"--net=/proc/{holder.pid}/ns/net", "--"]


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


@contextlib.contextmanager
def two_nodes(link: Link) -> Iterator[Nodes]:
    """Make two nodes, and remove them at the end.

    Raises:
        Unavailable: When this user or this kernel cannot.
    """
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed (Debian: iproute2, util-linux)")
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_namespace()) for _ in ADDRESSES]
        try:
            _veth(holders, link)
            limited_by = "veth, tc"
        except Unavailable:
            # The kernel has no netem (or no tbf).
            stack.enter_context(_forwarded(holders, link))
            limited_by = "a forwarder between two TUN devices"
        yield Nodes(holders, limited_by)


@contextlib.contextmanager
def _namespace() -> Iterator[subprocess.Popen[bytes]]:
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout is not None and holder.stderr is not None
            if not holder.stdout.readline():
                raise Unavailable(holder.stderr.read().decode().strip())
            _call(*_inside(holder), "ip", "link", "set", "lo", "up")
            yield holder
        finally:
            holder.kill()


def _address(holder: subprocess.Popen[bytes], node: int) -> None:
    enter = _inside(holder)
    _call(*enter, "ip", "address", "add", f"{ADDRESSES[node]}/24", "dev", DEVICE)
    _call(*enter, "ip", "link", "set", DEVICE, "up", "mtu", str(_MTU))


def _veth(holders: Sequence[subprocess.Popen[bytes]], link: Link) -> None:
    one, other = (str(holder.pid) for holder in holders)
    peer = ("peer", "name", DEVICE, "netns", other)
    _call("ip", "link", "add", DEVICE, "netns", one, "type", "veth", *peer)
    try:
        for node, holder in enumerate(holders):
            enter = _inside(holder)
            # Packets as a wire would carry them, so that they can be counted.
            _call(*enter, "ip", "link", "set", DEVICE, "gso_max_segs", "1")
            place = (*enter, "tc", "qdisc", "add", "dev", DEVICE)
            if link.delay:
                options = ["delay", f"{link.delay * 1e3}ms", "limit", "100000"]
                if link.megabits is not None:
                    options += ["rate", f"{link.megabits}mbit"]
                _call(*place, "root", "netem", *options)
            elif link.megabits is not None:
                options = ["rate", f"{link.megabits}mbit", "burst", "32kb"]
                _call(*place, "root", "tbf", *options, "latency", f"{_BUFFERED_SECONDS * 1e3}ms")
            _address(holder, node)
    except Unavailable:
        _call(*_inside(holders[0]), "ip", "link", "delete", DEVICE)
        raise


@contextlib.contextmanager
def _forwarded(holders: Sequence[subprocess.Popen[bytes]], link: Link) -> Iterator[None]:
    ended = threading.Event()
    devices: list[int] = []
    failures: list[OSError] = []

    def make() -> None:  # in a thread of its own: only that one enters the namespaces
        try:
            devices.extend(_tun(holder) for holder in holders)
        except OSError as error:
            failures.append(error)

    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    if failures:
        raise Unavailable(f"a TUN device: {failures[0]}")
    for node, holder in enumerate(holders):
        _address(holder, node)
    carrier = threading.Thread(target=_forward, args=(devices, link, ended), daemon=True)
    carrier.start()
    try:
        yield
    finally:
        ended.set()
        carrier.join()
        for device in devices:
            os.close(device)


def _tun(holder: subprocess.Popen[bytes]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{holder.pid}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    return device


def _forward(devices: Sequence[int], link: Link, ended: threading.Event) -> None:
    """Carry packets from each device to the other, late, and no faster than the link."""
    seconds_per_byte = 8e-6 / link.megabits if link.megabits is not None else 0.0
    free_at = [0.0, 0.0]  # when all that was sent so far has left
    under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while not ended.is_set():
        now = time.monotonic()
        due = min((packets[0][0] for packets in under_way if packets), default=now + 0.1)
        ready, _, _ = select.select(devices, [], [], max(0.0, min(due - now, 0.1)))
        for source, device in enumerate(devices):
            if device in ready:
                packet = os.read(device, _MTU)
                now = time.monotonic()
                if free_at[source] - now < _BUFFERED_SECONDS:
                    free_at[source] = max(free_at[source], now) + len(packet) * seconds_per_byte
                    under_way[source].append((free_at[source] + link.delay, packet))
        now = time.monotonic()
        for source, packets in enumerate(under_way):
            while packets and packets[0][0] <= now:
                os.write(devices[1 - source], packets.popleft()[1])
