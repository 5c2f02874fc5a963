"""Case 83. SLURM's variables: numbers that do not match fail at once, with both numbers."""

from __future__ import annotations

import pytest

from tests.adapters.lightning.modules import pl, quiet


def _slurm(monkeypatch: pytest.MonkeyPatch, tasks: int, name: str) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    for key, value in {
        "SLURM_NTASKS": tasks,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_JOB_NAME": name,
        "SLURM_JOB_ID": 7,
        "SLURM_NODEID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_PROCID": 0,
        "SLURM_NODELIST": "localhost",
    }.items():
        monkeypatch.setenv(key, str(value))
    quiet()


@pytest.mark.parametrize(("tasks", "devices"), [(1, 2), (4, 2)])
def test_tasks_that_are_not_the_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, tasks: int, devices: int
) -> None:
    _slurm(monkeypatch, tasks, "train")
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy="zero3", logger=False)
    assert type(trainer.strategy.cluster_environment).__name__ == "SLURMEnvironment"
    trainer.strategy._configure_launcher()  # which fit, validate, ... begin with
    with pytest.raises(ValueError, match=f"devices={devices}.*{tasks}"):
        trainer.strategy.launcher.launch(lambda: None)


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_an_interactive_shell_starts_its_own_processes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _slurm(monkeypatch, 1, name)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="zero3", logger=False)
    assert type(trainer.strategy.cluster_environment).__name__ == "LightningEnvironment"
    assert trainer.world_size == 2


@pytest.mark.parametrize(("tasks", "devices"), [(1, 2), (4, 2)])
def test_fabric_refuses_them_too(monkeypatch: pytest.MonkeyPatch, tasks: int, devices: int) -> None:
    from lightning.fabric import Fabric

    _slurm(monkeypatch, tasks, "train")
    with pytest.raises(ValueError, match=f"devices={devices}.*{tasks}"):
        Fabric(accelerator="cpu", devices=devices, strategy="zero3").launch()
