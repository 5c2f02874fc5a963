"""Each monitor fires on its fault and on nothing else; each target does what it declares."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardplug.checkpoint import ResumePoint
from shardplug.errors import CheckpointError, ConfigError
from shardplug.monitor import MONITORS, TARGETS, Monitor, MonitorConfig, Report, Target
from shardplug.monitor import monitor as module
from shardplug.monitor.detectors import detectors_of
from shardplug.monitor.row import StepRow

GIB = 2**30
Fault = Callable[[int, dict[str, Any]], None]


def values(step: int, noise: random.Random) -> dict[str, Any]:
    """A healthy step of four ranks: a falling, noisy loss, memory that settles, some slow steps."""
    seconds = 0.5 * (1 + 0.1 * abs(noise.gauss(0, 1))) + (2.0 if step % 50 == 0 else 0.0)
    settled = 1 - math.exp(-step / 30)
    return {
        "seconds": seconds,
        "loss": 2.0 + 4.0 * math.exp(-step / 60) + noise.gauss(0, 0.05),
        "grad_norm": 1.0 + 2.0 * math.exp(-step / 40) + abs(noise.gauss(0, 0.3)),
        "tokens_per_second": 8192 / seconds,
        "busy_seconds": tuple(seconds * (0.8 + 0.05 * noise.random()) for _ in range(4)),
        "memory_bytes": tuple(int(GIB * (2 + settled + 0.02 * noise.random())) for _ in range(4)),
        "nonfinite": (),
    }


def run(
    monkeypatch: pytest.MonkeyPatch,
    config: MonitorConfig | dict[str, Any] | None = None,
    fault: Fault | None = None,
    steps: int = 200,
    folder: Path | None = None,
) -> tuple[Monitor, list[Report]]:
    """Run the monitor over steps whose gathered rows are made up."""
    noise = random.Random(7)
    monitor = Monitor(config, folder=folder)
    reports = []
    for step in range(1, steps + 1):
        row = values(step, noise)
        if fault is not None and step > 120:
            fault(step, row)
        monkeypatch.setattr(module, "gather", lambda *_, row=row, step=step: StepRow(step, **row))
        reports.append(monitor.step(step, loss=row["loss"]))
    monitor.close()
    return monitor, reports


def found(reports: list[Report]) -> dict[str, int]:
    """The first step at which each kind was found."""
    first: dict[str, int] = {}
    for report in reports:
        for alert in report.alerts:
            first.setdefault(alert.kind, alert.step)
    return first


def test_a_clean_run_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shardplug.monitor"):
        monitor, reports = run(monkeypatch)
    assert len(reports) == 200 and all(report.row is not None for report in reports)
    assert set(monitor._detectors) == set(MONITORS)
    assert found(reports) == {}
    assert caplog.records == []


def _nonfinite(step: int, row: dict[str, Any]) -> None:
    row["loss"], row["nonfinite"] = math.nan, ((2, "loss"),)


def _spike(step: int, row: dict[str, Any]) -> None:
    row["loss"] += 3.0 if step == 130 else 0.0


def _norm(step: int, row: dict[str, Any]) -> None:
    row["grad_norm"] *= 1.06 ** (step - 120)


def _slower(step: int, row: dict[str, Any]) -> None:
    row["tokens_per_second"] *= 0.6


def _leak(step: int, row: dict[str, Any]) -> None:
    first, second, *rest = row["memory_bytes"]
    row["memory_bytes"] = (first, second + (step - 120) * GIB // 100, *rest)


def _lag(step: int, row: dict[str, Any]) -> None:
    first, second, third, last = row["busy_seconds"]
    row["busy_seconds"] = (first / 2, second / 2, third / 2, last)


FAULTS: dict[str, tuple[Fault, str, int]] = {
    "nonfinite": (_nonfinite, "not finite: loss of rank 2", 121),
    "loss_spike": (_spike, "is usual", 130),
    "grad_norm_drift": (_norm, "gradient norm", 190),
    "throughput_drift": (_slower, "tokens/s, where it was", 132),
    "memory_drift": (_leak, "memory of rank 1 grew", 180),
    "lagging_rank": (_lag, "rank 3 works", 132),
}


def test_every_monitor_has_a_fault() -> None:
    assert set(FAULTS) == set(MONITORS)


@pytest.mark.parametrize("kind", MONITORS)
def test_a_monitor_fires_on_its_fault_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    fault, text, latest = FAULTS[kind]
    with caplog.at_level(logging.WARNING, "shardplug.monitor"):
        _, reports = run(monkeypatch, fault=fault)
    first = found(reports)
    assert list(first) == [kind]
    assert 120 < first[kind] <= latest
    alert = next(alert for report in reports for alert in report.alerts)
    assert text in alert.text
    assert text in caplog.text and f"step {alert.step}" in caplog.text


def test_what_is_left_out_does_not_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reports = run(monkeypatch, {"loss_spike": None}, _spike)
    assert found(reports) == {}


# -- targets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "met", "missed"),
    [
        ("step_seconds", 1.0, 0.3),
        ("tokens_per_second", 10_000, 30_000),
        ("memory_gib", 4, 2.5),
        ("loss", 3.0, 1.5),
        ("cost", 10.0, 0.5),
    ],
)
def test_a_target_is_met_or_missed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    met: float,
    missed: float,
) -> None:
    start = {"from_step": 150} if name == "loss" else {}
    for limit, is_met in ((met, True), (missed, False)):
        target = {"limit": limit, "action": "stop", **start}
        config = {"targets": {name: target}, "price_per_hour": 36.0}
        caplog.clear()
        with caplog.at_level(logging.INFO, "shardplug.monitor"):
            monitor, reports = run(monkeypatch, config)
        assert monitor.targets == {name: is_met}
        assert f"target {name}: {'met' if is_met else 'missed'}" in caplog.text
        judged = [report for report in reports if name in report.targets]
        assert judged
        assert {report.action for report in reports} == ({"none"} if is_met else {"none", "stop"})
        if name == "loss":
            assert judged[0].row is not None and judged[0].row.step == 150
        if not is_met:
            assert f"{name} is" in caplog.text and "declared" in caplog.text


def test_a_miss_is_said_once_and_again_after_it_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    def heavy(step: int, row: dict[str, Any]) -> None:
        if step in (130, 131, 140):
            row["memory_bytes"] = (9 * GIB,) * 4

    _, reports = run(monkeypatch, {"targets": {"memory_gib": 4}, "memory_growth": None}, heavy)
    said = [alert.step for report in reports for alert in report.alerts]
    assert said == [130, 140]
    assert {report.action for report in reports} == {"none", "warn"}


def test_what_is_not_finite_is_said_at_the_1st_10th_and_100th_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, reports = run(monkeypatch, fault=_nonfinite, steps=230)
    said = {alert.step: alert.text for report in reports for alert in report.alerts}
    assert list(said) == [121, 130, 220]
    assert said[220].endswith("in 100 looks so far")


def test_a_healthy_run_of_300_steps_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients grow while the network learns, and a process by some MiB."""

    def learns(step: int, row: dict[str, Any]) -> None:
        fallen = math.exp(-(step - 120) / 100)
        row["loss"] = 1.0 + fallen + 0.01 * math.sin(step)
        row["grad_norm"] *= 1 + 7 * (1 - fallen)
        row["memory_bytes"] = tuple(2**28 + (step - 120) * 2**19 for _ in row["memory_bytes"])

    _, reports = run(monkeypatch, fault=learns, steps=300)
    assert found(reports) == {}
    assert reports[-1].row is not None and reports[100].row is not None
    assert reports[-1].row.grad_norm > 4 * reports[100].row.grad_norm
    assert reports[-1].row.memory_bytes[0] > 1.05 * 2**28


def test_a_target_that_cannot_be_judged_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def untold(step: int, row: dict[str, Any]) -> None:
        row["tokens_per_second"] = None

    for fault, times in ((untold, 1), (None, 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "shardplug.monitor"):
            config = {"targets": {"tokens_per_second": {"limit": 1.0, "from_step": 150}}}
            run(monkeypatch, {**config, "throughput_drift": None}, fault)
        assert caplog.text.count("tokens_per_second cannot be judged: no tokens") == times


def test_every_target_is_known() -> None:
    assert set(TARGETS) == {"step_seconds", "tokens_per_second", "memory_gib", "loss", "cost"}


def test_a_rollback_goes_to_the_newest_checkpoint_and_stops_after_too_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    point = ResumePoint(path=tmp_path / "step-100", step=100, passed_over=())
    monkeypatch.setattr(module, "resume_point", lambda folder: point)
    config = {"actions": {"nonfinite": "rollback"}, "max_rollbacks": 2}
    monitor, reports = run(monkeypatch, config, _nonfinite, steps=123, folder=tmp_path)
    assert [report.action for report in reports[120:]] == ["rollback", "rollback", "stop"]
    assert [report.resume for report in reports[120:]] == [point, point, None]
    assert monitor.rollbacks == 2
    text = reports[-1].alerts[-1].text
    assert "gone back 2 times already" in text
    assert "not to be used" in text and str(tmp_path / "step-100") in text


def test_a_rollback_without_a_whole_checkpoint_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(folder: Path) -> None:
        raise CheckpointError("Expected a whole checkpoint, but there is none")

    config = {"actions": {"nonfinite": "rollback"}}
    for look, text in ((lambda folder: None, "no checkpoint in"), (broken, "a whole checkpoint")):
        monkeypatch.setattr(module, "resume_point", look)
        _, reports = run(monkeypatch, config, _nonfinite, steps=121, folder=tmp_path)
        assert reports[-1].action == "stop"
        assert text in reports[-1].alerts[-1].text


# -- options -----------------------------------------------------------------------------------


def test_options_come_from_yaml() -> None:
    text = """
    window: 100
    actions: {nonfinite: rollback}
    price_per_hour: 32
    targets:
      step_seconds: 1.2
      loss: {limit: 2.5, from_step: 2000, action: stop}
      cost: {limit: 500, action: stop}
    """
    config = MonitorConfig.from_dict(yaml.safe_load(text))
    assert config.may_roll_back and config.recent == 20
    assert config.targets["step_seconds"] == Target(limit=1.2)
    assert config.targets["loss"] == Target(limit=2.5, from_step=2000, action="stop")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"windows": 3}, "Unknown option 'windows'; expected one of every_n_steps"),
        ({"targets": {"speed": 3}}, "Unknown target 'speed'"),
        ({"targets": {"loss": 3}}, "Expected from_step with a target of loss"),
        ({"targets": {"cost": 3}}, "Expected price_per_hour"),
        ({"targets": {"step_seconds": {"limt": 3}}}, "Unknown field of the target step_seconds"),
        ({"targets": {"step_seconds": {"action": "stop"}}}, "Expected a limit for the target"),
        ({"targets": {"step_seconds": -1}}, "limit above 0"),
        ({"targets": {"step_seconds": {"limit": 1, "from_step": 0}}}, "from_step >= 1"),
        ({"targets": [1]}, "Expected targets to be a mapping"),
        ({"actions": {"nan": "stop"}}, "Unknown monitor 'nan'"),
        ({"actions": {"nonfinite": "halt"}}, "action of warn, stop, rollback, got 'halt'"),
        ({"window": 2}, "window to be 10 or more"),
        ({"throughput_drift": 1.5}, "below 1"),
        ({"lag": 0.5}, "lag above 1"),
        ({"max_rollbacks": -1}, "max_rollbacks >= 0"),
        ("stop", "Expected a mapping"),
    ],
)
def test_wrong_options_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MonitorConfig.from_dict(options)


def test_a_target_must_be_a_target() -> None:
    with pytest.raises(ConfigError, match="to be a Target, got int"):
        MonitorConfig(targets={"step_seconds": 3})  # type: ignore[dict-item]


def test_rollback_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="Expected a folder of checkpoints"):
        Monitor({"actions": {"loss_spike": "rollback"}})


def test_steps_between_looks_are_counted_and_not_read() -> None:
    monitor = Monitor({"every_n_steps": 4, "price_per_hour": 3600.0, "targets": {"cost": 5.0}})
    for step in range(1, 9):
        looks = monitor.looks_at_next()
        assert looks == (step % 4 == 0)
        loss = 1.0 if looks else None
        report = monitor.step(step, loss=loss, tokens=100, seconds=1.0 + step % 4, memory_bytes=GIB)
        assert (report.row is not None) == looks
    assert report.row is not None
    assert report.row.seconds == 2.5 and report.row.tokens_per_second == 40.0
    assert monitor.run_seconds == 20.0
    assert monitor.targets == {"cost": False}  # 20 s at 1 a second
    resumed = Monitor({"every_n_steps": 4})
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.run_seconds == 20.0


def _with_loss(loss: float) -> StepRow:
    return StepRow(0, 1.0, loss, None, None, (), (), ())


def test_a_spike_counts_from_the_first_step_after_the_warmup() -> None:
    config = MonitorConfig()
    warmup = max(config.warmup, config.recent)
    for number, found in ((warmup, False), (warmup + 1, True)):
        detector = detectors_of(config)["loss_spike"]
        for _ in range(number - 1):
            assert detector.look(_with_loss(1.0)) is None
        assert (detector.look(_with_loss(9.0)) is not None) == found
