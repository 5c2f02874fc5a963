"""Tokens, rates, and the share of a device's peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardplug.errors import ConfigError
from shardplug.memory import PEAK_TFLOPS
from shardplug.plan.run.throughput import BatchSize, batch_size_of, costs_of, peak_flops
from shardplug.plan.trace.recorder import flops_of

IDS = torch.zeros(3, 7, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IDS, BatchSize(21, 3)),
        ({"attention_mask": torch.ones(3, 9), "input_ids": IDS}, BatchSize(21, 3)),
        (((), {"labels": IDS[:, :2], "input_ids": IDS}), BatchSize(21, 3)),
        (((IDS,), {}), BatchSize(21, 3)),
        ([torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.int64)], BatchSize(0, 5)),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, BatchSize(0, 2)),
        ("text", BatchSize()),
    ],
)
def test_work_of_a_batch(batch: Any, expected: BatchSize) -> None:
    assert batch_size_of(batch) == expected


class _Device:
    def __init__(self, name: str) -> None:
        self._name = name

    def get_device_name(self, device: torch.device) -> str:
        return self._name


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIE"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_of_known_devices(
    name: str, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: _Device(name))
    gpu = torch.device("cuda")
    low = None if known is None else PEAK_TFLOPS[known][0] * 1e12
    full = None if known is None else PEAK_TFLOPS[known][2] * 1e12
    assert peak_flops(gpu, torch.bfloat16) == low
    assert peak_flops(gpu, torch.float32) == full
    assert peak_flops(gpu, torch.float64) is None
    assert peak_flops(gpu, torch.bfloat16, 3.0) == 3e12


def test_peak_of_a_cpu_is_given_or_unknown() -> None:
    cpu = torch.device("cpu")
    assert peak_flops(cpu, torch.float32) is None
    assert peak_flops(cpu, torch.float32, 0.5) == 0.5e12
    with pytest.raises(ConfigError, match="peak_tflops above 0, got -1"):
        peak_flops(cpu, torch.float32, -1)


def test_rates_count_the_slowest_rank_and_all_tokens() -> None:
    ranks = [(2_000_000_000, 100, 4), (1_000_000_000, 300, 4)]
    first, second = costs_of(ranks, (BatchSize(50, 2), 10**9), 4e9)
    assert first["step_seconds"] == second["step_seconds"] == 2.0
    assert first["tokens_per_second"] == second["tokens_per_second"] == 200.0
    assert first["samples_per_second"] == 4.0
    # Twice the tokens of the batch that was traced, in two seconds.
    assert (first["flops_per_second"], first["mfu"]) == (1e9, 0.25)
    assert (second["flops_per_second"], second["mfu"]) == (3e9, 0.75)


def test_no_time_no_rates_and_no_peak_no_mfu() -> None:
    assert costs_of([(0, 5, 1), (7, 5, 1)], (BatchSize(5, 1), 10), None) == [{}, {}]
    (found,) = costs_of([(10**9, 5, 1)], (BatchSize(), 0), None)
    assert (found["tokens_per_second"], found["flops_per_second"], found["mfu"]) == (5.0, 0.0, 0.0)


@pytest.mark.parametrize("strict", [False, True])
def test_grouped_queries_are_counted_by_every_torch(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    from torch.utils.flop_counter import flop_registry

    forward = torch.ops.aten._scaled_dot_product_flash_attention
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    if strict:  # as torch before 2.13 has them: keys have as many heads as queries, or it raises

        def forward_strict(q: Any, k: Any, v: Any, *rest: Any, out_val: Any = None) -> int:
            assert q.shape[1] == k.shape[1] == v.shape[1]
            return 4 * q.numel() * k.shape[2]

        def backward_strict(g: Any, q: Any, k: Any, v: Any, *rest: Any, out_val: Any = None) -> int:
            assert q.shape[1] == k.shape[1] == v.shape[1]
            return 10 * q.numel() * k.shape[2]

        monkeypatch.setitem(flop_registry, forward, forward_strict)
        monkeypatch.setitem(flop_registry, backward, backward_strict)
    q = torch.empty(2, 8, 32, 16, device="meta")
    for heads in (8, 2):
        k = torch.empty(2, heads, 32, 16, device="meta")
        assert flops_of(forward.default, (q, k, k), {}, q) == 4 * q.numel() * 32
        # The scores again, and two products for each of the forward's two.
        assert flops_of(backward.default, (q, q, k, k), {}, q) == 10 * q.numel() * 32
