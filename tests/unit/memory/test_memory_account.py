"""The formulas, row by row."""

from __future__ import annotations

from fractions import Fraction as F

import pytest

from shardplug.errors import ConfigError
from shardplug.memory import (
    ElementBytes,
    Moment,
    ParameterSize,
    bytes_per_parameter,
    model_states,
    paper_bytes,
)

FORWARD = Moment(phase="after_forward", last=False)
BETWEEN = Moment(phase="after_backward", last=False)
LAST = Moment(phase="after_backward", first=False)
REST = Moment(phase="at_rest")
FP32 = ElementBytes()
BF16_FP32 = ElementBytes(compute=2)
BF16_BF16 = ElementBytes(compute=2, reduce=2)


@pytest.mark.parametrize("n", [1, 2, 4, 7])
@pytest.mark.parametrize(
    ("sizes", "stage", "forward", "between"),
    # Each pair is the part that is whole on every rank, and the part that is shared by N.
    [
        (FP32, 1, (4, 12), (4 + 4, 12)),
        (FP32, 2, (4, 12), (4, 16)),
        (FP32, 3, (0, 12), (0, 16)),
        (BF16_FP32, 1, (2, 12), (2 + 4, 12)),
        (BF16_BF16, 1, (2, 12), (2 + 2, 12)),
        (BF16_FP32, 2, (2, 12), (2, 16)),
        (BF16_BF16, 2, (2, 12), (2, 16)),
        (BF16_FP32, 3, (0, 12), (0, 16)),
        (BF16_BF16, 3, (0, 12), (0, 16)),
    ],
)
def test_bytes_per_parameter_equal_the_table(
    sizes: ElementBytes, stage: int, forward: tuple[int, int], between: tuple[int, int], n: int
) -> None:
    expected = {FORWARD: forward, BETWEEN: between, LAST: (0, 16), REST: (0, 12)}
    for moment, (whole, shared) in expected.items():
        kinds = bytes_per_parameter(stage, n, moment, sizes)
        assert sum(kinds.values()) == whole + F(shared, n), moment
        assert kinds["master_shards"] == F(4, n)
        assert kinds["optimizer_state"] == F(8, n)


def test_kinds_in_the_middle_of_a_window() -> None:
    later_forward = Moment(phase="after_forward", first=False)
    assert bytes_per_parameter(1, 2, later_forward)["gradients"] == 4  # whole, not reduced yet
    assert bytes_per_parameter(2, 2, later_forward)["gradients"] == 2
    assert bytes_per_parameter(3, 2, later_forward)["gradients"] == 2
    assert bytes_per_parameter(3, 2, later_forward)["gathered"] == 0


def test_first_step_and_stale_gradients() -> None:
    first = Moment(phase="after_forward", stepped=False)
    assert bytes_per_parameter(2, 4, first)["optimizer_state"] == 0
    assert bytes_per_parameter(2, 4, first)["gradients"] == 0
    stale = Moment(phase="after_forward", grads_kept_through_forward=True)
    assert bytes_per_parameter(2, 4, stale)["gradients"] == 1
    assert bytes_per_parameter(2, 4, Moment(phase="after_step"))["gradients"] == 1


def test_model_states_state_padding_separately() -> None:
    states = model_states([(257, 3)], 1, 2, FORWARD)
    assert states.exact["master_shards"] == F(257 * 3 * 4, 2)
    assert states.padding["master_shards"] == 3 * 2  # half a row of three fp32 elements each
    assert states.exact["master_shards"] + states.padding["master_shards"] == 129 * 3 * 4
    assert states.exact["gathered"] + states.padding["gathered"] == 258 * 3 * 4
    assert model_states([(256, 3)], 1, 2, FORWARD).padding == dict.fromkeys(states.padding, 0)


def test_model_states_of_one_shard() -> None:
    # 5 rows of 3 in 4 chunks of 2 rows: 2, 2, 1 and 0 rows.
    for shard, rows in enumerate((2, 2, 1, 0)):
        states = model_states([(5, 3)], 3, 4, LAST, shard=shard)
        row_bytes = {"master_shards": 12, "gathered": 0, "gradients": 12, "optimizer_state": 24}
        assert states.exact == {kind: n * rows for kind, n in row_bytes.items()}
        assert states.padding == {
            "master_shards": 12 * (2 - rows),
            "gathered": 0,
            "gradients": 12 * (2 - rows),
            "optimizer_state": 0,  # made for the rank's own rows
        }
    gathered = model_states([(5, 3)], 1, 4, BETWEEN, shard=3)
    assert (gathered.exact["gathered"], gathered.padding["gathered"]) == (60, 36)
    assert (gathered.exact["gradients"], gathered.padding["gradients"]) == (60, 0)
    with pytest.raises(ConfigError, match="Expected a shard from 0 to 3, got 4"):
        model_states([(5, 3)], 3, 4, LAST, shard=4)


def test_model_states_of_frozen_and_scalar_parameters() -> None:
    frozen = model_states([ParameterSize(shape=(8, 2), trainable=False)], 3, 2, LAST)
    assert {k: float(v) for k, v in frozen.exact.items()} == {
        "master_shards": 32,
        "gathered": 0,
        "gradients": 0,
        "optimizer_state": 0,
    }
    scalar = model_states([()], 1, 4, LAST)
    assert float(scalar.total) == 16
    assert model_states([()], 1, 4, FORWARD).exact["gathered"] == 0


def test_paper_bytes_are_the_paper_figures() -> None:
    gigabytes = [round(paper_bytes(stage, 7.5e9, 64) / 1e9, 1) for stage in range(4)]
    assert gigabytes == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("stage", [0, 4])
def test_unknown_stage_is_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match="Expected stage 1, 2 or 3"):
        bytes_per_parameter(stage, 2, REST)
    with pytest.raises(ConfigError, match="Expected stage 0, 1, 2 or 3"):
        paper_bytes(stage + 5, 1, 1)


def test_no_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match="Expected num_shards >= 1, got 0"):
        bytes_per_parameter(1, 0, REST)
