"""Loading takes a rank's own shard, and little besides."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.processes import Processes

MIB = 2**20
SCRIPT = Path(__file__).with_name("load_rank.py")


def write_large(folder: Path) -> tuple[int, float]:
    """Write 200 M parameters in bf16, in several files; return the largest tensor's elements."""
    config = LlamaConfig(
        vocab_size=32003,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    pieces: dict[str, dict[str, torch.Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(2**16, generator=generator).to(torch.bfloat16)
    total = 0.0
    for name, parameter in model.named_parameters():
        value = block.repeat(-(-parameter.numel() // block.numel()))[: parameter.numel()]
        total += float(value.double().sum())
        file = f"model-{len(name) % 3}.safetensors"
        pieces.setdefault(file, {})[name] = value.view(parameter.shape)
    weight_map = {name: file for file, tensors in pieces.items() for name in tensors}
    for file, tensors in pieces.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return max(p.numel() for p in model.parameters()), total


@pytest.mark.slow
def test_each_rank_takes_its_shard_the_largest_tensor_and_64_mib(tmp_path):
    largest, total = write_large(tmp_path)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SCRIPT.parents[3]),
    }
    command = [sys.executable, str(SCRIPT)]
    results = []
    with Processes() as processes:
        ranks = [
            processes.start(
                [*command, str(rank), "2", str(tmp_path / "store"), str(tmp_path)],
                env=environment,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            out, errors = rank.communicate(timeout=110)
            assert rank.returncode == 0, errors
            results.append(json.loads(out))
    for result in results:
        print(result)
        assert result["elements"] > 195e6
        assert result["dtype"] == "torch.float32"
        assert result["shard"] >= 0.99 * 2 * result["elements"]  # half of them, 4 bytes each
        assert result["peak"] <= result["shard"] + largest + 64 * MIB, result
        assert result["on_meta"] <= 64 * MIB
    assert sum(result["sum"] for result in results) == pytest.approx(total, rel=1e-9)
