"""Reads the history out of an offline W&B run's own file.

The file is a log in LevelDB's format: blocks of 32 KiB, in them chunks with a 7-byte header
(checksum, length, kind), and a record is one chunk or several. Each record is a protobuf message.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_FULL, _LAST = 1, 4


def read_records(folder: Path) -> list[Any]:
    """Return every record of the one offline run below `folder`, once it is finished."""
    from wandb.proto import wandb_internal_pb2

    runs = sorted(folder.glob("**/offline-run-*"))
    assert len(runs) == 1, f"expected one offline run, got {runs}"
    deadline = time.monotonic() + 20
    while not list(runs[0].glob("*.wandb")):  # another process writes it
        assert time.monotonic() < deadline, f"{runs[0]} has no file of the run"
        time.sleep(0.1)
    (path,) = runs[0].glob("*.wandb")
    while True:
        records = []
        for message in _messages(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            records.append(record)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"{path} does not end"
        time.sleep(0.1)


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the history, each a dictionary of what was logged."""
    rows = []
    for record in read_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def _messages(raw: bytes) -> Iterator[bytes]:
    assert raw[:4] == b":W&B", raw[:8]
    position, message = 7, b""
    while position + _HEADER.size <= len(raw):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:  # too short for a header: filled with zeros
            position += left
            continue
        _, length, kind = _HEADER.unpack_from(raw, position)
        position += _HEADER.size
        if position + length > len(raw):
            return  # W&B is still writing it
        message += raw[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield message
            message = b""
