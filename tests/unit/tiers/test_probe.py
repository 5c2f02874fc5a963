"""What `shardplug doctor` measures and says."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shardplug.cli import doctor
from shardplug.errors import ConfigError
from shardplug.tiers import PATH_VARIABLE, probe
from shardplug.tiers.filesystem import Filesystem
from shardplug.tiers.probe import DiskProbe, MemoryProbe, probe_disk, probe_memory, step_seconds

MEMORY = MemoryProbe(
    num_threads=2, copy_bytes_per_second=28e9, pinned=False, lock_limit_bytes=None, locks=True
)
DISK = DiskProbe(
    filesystem=Filesystem("ext4"),
    free_bytes=9 * 2**30,
    direct=True,
    read_bytes_per_second=1e9,
    write_bytes_per_second=2e9,
)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(list(arguments)))


def test_measures_and_leaves_nothing(tmp_path: Path) -> None:
    found = probe_disk(tmp_path, 9 * 2**20)
    assert found.read_bytes_per_second > 0 and found.write_bytes_per_second > 0
    assert found.free_bytes > 0 and found.filesystem.kind != "unknown"
    assert not list(tmp_path.iterdir())
    memory = probe_memory(2**20)
    assert memory.copy_bytes_per_second > 0 and memory.num_threads >= 1


def test_bad_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        probe_disk(tmp_path / "no")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match=f"Expected to write 5 bytes into {tmp_path}.*No space"):
        probe_disk(tmp_path, 5)
    assert not list(tmp_path.iterdir())


def test_cost_of_a_step() -> None:
    assert step_seconds(1e9, None, MEMORY) == 1.0  # 28 bytes of memory traffic for each
    assert step_seconds(1e9, DISK, MEMORY) == 12.0  # 8 bytes at 1 GB/s and 8 at 2 GB/s
    slow = MemoryProbe(
        num_threads=1, copy_bytes_per_second=1e9, pinned=False, lock_limit_bytes=0, locks=False
    )
    assert step_seconds(1e9, DISK, slow) == 28.0


def test_doctor_says_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_memory", lambda: MEMORY)
    monkeypatch.setattr(doctor, "probe_disk", lambda path, num_bytes: DISK)
    assert run("--nvme-path", "/mnt/nvme", "--parameters", "2b", "--ranks", "2") == 0
    said = capsys.readouterr().out
    for part in (
        "/mnt/nvme on ext4, 9.0 GiB free",
        "O_DIRECT",
        "nothing is compiled",
        "read: 1.00 GB/s",
        "unlimited allowed",
        '"cpu": 7.45 GiB of CPU memory a rank; about 1.00 s',
        "about 12.00 s",
        "64 MiB buffers",
    ):
        assert part in said, said
    assert run("--nvme-path", "/mnt/nvme", "--parameters", "2b") == 1
    assert "5.90 GiB more are needed in /mnt/nvme" in capsys.readouterr().out
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    assert run() == 0
    assert "not measured" in capsys.readouterr().out
    for bad in (("--parameters", "many"), ("--parameters", "0b"), ("--ranks", "0"), ("--mib", "0")):
        with pytest.raises(ConfigError, match="got"):
            run(*bad)


def test_little_locked_memory_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, hard))
    try:
        found = probe.probe_memory(2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert found.lock_limit_bytes == 4096
    monkeypatch.setattr(doctor, "probe_memory", lambda: found)
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    run()
    assert "0.0 MiB allowed" in capsys.readouterr().out
