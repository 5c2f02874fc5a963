"""Checksums by block, while writing and while reading; fsync."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardplug.checkpoint.format import durable
from shardplug.checkpoint.format.durable import (
    CheckedFileSystem,
    SummingFileSystem,
    file_checksums,
    sync,
    verify_file,
)
from shardplug.errors import CheckpointError
from tests.support.faults import DAMAGES, failing

BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "BLOCK_BYTES", BLOCK)


def some_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def expected(data: bytes) -> dict[str, Any]:
    """The definition, written another way."""
    starts = range(0, len(data), BLOCK)
    return {
        "bytes": len(data),
        "crc32": [zlib.crc32(data[start : start + BLOCK]) for start in starts],
    }


SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 17)


@pytest.mark.parametrize("size", SIZES)
def test_checksums_of_a_file_and_of_what_is_written_agree(tmp_path: Path, size: int) -> None:
    data, chance = some_bytes(size), random.Random(1)
    files = SummingFileSystem()
    with files.create_stream(tmp_path / "a", "wb") as stream:
        rest = memoryview(data)
        while rest:
            piece = rest[: chance.randint(1, 2 * BLOCK)]
            assert stream.write(piece) == len(piece)
            rest = rest[len(piece) :]
            assert stream.tell() == len(data) - len(rest)
        os.fsync(stream.fileno())
        assert (tmp_path / "a").read_bytes() == data  # fsync met what was written
        stream.close()
    assert (tmp_path / "a").read_bytes() == data
    assert files.entries == {"a": expected(data)}
    assert file_checksums(tmp_path / "a") == expected(data)
    assert verify_file(tmp_path / "a", expected(data), BLOCK) is None


def test_a_pickle_is_summed_and_read_back(tmp_path: Path) -> None:
    value, files = {"a": list(range(300))}, SummingFileSystem()
    with files.create_stream(tmp_path / "a", "wb") as stream:
        pickle.dump(value, stream)
    assert files.entries["a"] == file_checksums(tmp_path / "a")
    with CheckedFileSystem(files.entries, BLOCK).create_stream(tmp_path / "a", "rb") as stream:
        assert pickle.load(stream) == value


def test_other_modes_pass_through(tmp_path: Path) -> None:
    files = SummingFileSystem()
    (tmp_path / "a").write_bytes(b"abc")
    with files.create_stream(tmp_path / "a", "rb") as stream:
        assert stream.read() == b"abc"
    assert files.entries == {}
    with CheckedFileSystem({}, BLOCK).create_stream(tmp_path / "b", "wb") as stream:
        stream.write(b"xyz")
    with CheckedFileSystem({}, BLOCK).create_stream(tmp_path / "b", "rb") as stream:
        assert stream.read() == b"xyz"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("size", SIZES[2:])
def test_damage_is_told(tmp_path: Path, size: int, damage: Any) -> None:
    file = tmp_path / "a"
    file.write_bytes(some_bytes(size))
    entry = file_checksums(file)
    damage(file)
    wrong = verify_file(file, entry, BLOCK)
    assert wrong is not None
    if damage is Path.unlink:
        assert wrong == "is missing"
    elif damage.__name__.startswith("flip"):
        assert wrong.startswith("has other bytes than were written, between ")
    else:
        assert wrong == f"has {file.stat().st_size} bytes, {size} were written"
    if file.exists():  # an entry of a format without checksums
        sizes_only = verify_file(file, {"bytes": size}, BLOCK)
        assert sizes_only == (None if damage.__name__.startswith("flip") else wrong)


def test_the_place_of_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a"
    data = bytearray(some_bytes(3 * BLOCK + 5))
    entry = expected(data)
    data[-1] ^= 1
    file.write_bytes(data)
    assert verify_file(file, entry, BLOCK) == (
        f"has other bytes than were written, between {3 * BLOCK} and {3 * BLOCK + 5}"
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_checked_stream_reads_as_a_file_does(tmp_path: Path, size: int) -> None:
    data, chance = some_bytes(size), random.Random(2)
    (tmp_path / "a").write_bytes(data)
    files = CheckedFileSystem({"a": expected(data)}, BLOCK)
    plain = io.BytesIO(data)
    with files.create_stream(tmp_path / "a", "rb") as stream:
        assert stream.readable() and stream.seekable() and not stream.writable()
        for _ in range(200):
            whence = chance.choice((io.SEEK_SET, io.SEEK_CUR, io.SEEK_END))
            offset = chance.randint(0, size + 9) if whence == io.SEEK_SET else 0
            assert stream.seek(offset, whence) == plain.seek(offset, whence)
            count = chance.choice((-1, 0, 1, BLOCK, chance.randint(0, 3 * BLOCK)))
            assert stream.read(count) == plain.read(count)
            assert stream.tell() == plain.tell()


def test_a_checked_stream_gives_out_no_damaged_byte(tmp_path: Path) -> None:
    data = bytearray(some_bytes(4 * BLOCK))
    entry = expected(data)
    data[2 * BLOCK + 3] ^= 4
    (tmp_path / "a").write_bytes(data)
    with CheckedFileSystem({"a": entry}, BLOCK).create_stream(tmp_path / "a", "rb") as stream:
        assert stream.read(2 * BLOCK) == data[: 2 * BLOCK]
        for count in (1, BLOCK, 2 * BLOCK):
            stream.seek(2 * BLOCK)
            with pytest.raises(CheckpointError, match=r"is damaged: a has other .* 128 and 192\."):
                stream.read(count)
        stream.seek(3 * BLOCK)
        assert stream.read() == data[3 * BLOCK :]
        stream.seek(3 * BLOCK - 1)  # the block that was refused is not remembered as good
        with pytest.raises(CheckpointError, match="other bytes"):
            stream.read(2)


def test_a_checked_stream_notices_another_length(tmp_path: Path) -> None:
    data = some_bytes(2 * BLOCK)
    file = tmp_path / "a"
    file.write_bytes(data + b"x" * BLOCK)
    files = CheckedFileSystem({"a": expected(data)}, BLOCK)
    with files.create_stream(file, "rb") as stream:
        assert stream.read(2 * BLOCK) == data
        with pytest.raises(CheckpointError, match="damaged"):
            stream.read(1)
    file.write_bytes(data)
    with files.create_stream(file, "rb") as stream:
        os.truncate(file, BLOCK + 1)  # cut under the reader's hands
        with pytest.raises(CheckpointError, match="ends too early"):
            stream.read()


def test_a_failed_write_is_not_counted(tmp_path: Path) -> None:
    files = SummingFileSystem()
    with (
        pytest.raises(OSError, match="No space"),
        mock.patch.object(durable._SummingStream, "write", side_effect=OSError(28, "No space")),
        files.create_stream(tmp_path / "a", "wb") as stream,
    ):
        stream.write(b"abc")
    assert files.entries == {}


def open_below(folder: Path) -> list[str]:
    """What this process has open there; other threads open and close files elsewhere."""
    found = []
    for link in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{link}"))
    return [path for path in found if Path(path).is_relative_to(folder.resolve())]


def test_sync_reaches_the_disk_or_raises(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with (tmp_path / "a").open("rb"):
        assert len(open_below(tmp_path)) == 1
    with failing("fsync", 3) as hits:
        sync(tmp_path / "a")
        sync(tmp_path)
        with pytest.raises(OSError, match="fault in fsync") as error:
            sync(tmp_path)
    assert error.value.errno == errno.EIO and hits.count == 1
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "b")
    assert open_below(tmp_path) == []
