"""What libraries read off a sharded model, its class's name and FSDP2's mark, and what they do.

`NAMES` and `MARKS` list the places in the installed libraries. One test looks for places that are
not listed, one that every module is called as it was, and each place that would change what is
computed has a comparison with the unsharded model, here or where the table says.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.metadata
import importlib.util
import inspect
import pickle
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ModelError, ScheduleError
from tests.adapters.hf_trainer.common import build
from tests.support.parity import raises_everywhere
from tests.support.pool import RankPool

VERSIONS = {
    "transformers": "5.24",
    "accelerate": "1.15",
    "trl": "1.16",
    "peft": "0.21",
    "lightning": "2.6",
    "torchmetrics": "1.9",
}
"""The versions that the lists were made from."""

NAMES = {
    "transformers/trainer.py": "labels are shifted for causal models when they are smoothed: "
    "hf_trainer/test_trainer_features.py; warnings; columns that the forward takes",
    "transformers/modeling_utils.py": "architectures in config.json; initialisation of norms",
    "transformers/conversion_mapping.py": "renamed weights: hf/test_hf_loading.py",
    "transformers/generation/*": "which models may assist another; Donut's first tokens",
    "transformers/pipelines/*": "which models a task takes, and their prompts",
    "transformers/modelcard.py": "the title of a model card",
    "transformers/models/*": "initialisation of norms, which shard() does beforehand",
    "transformers/trainer_pt_utils.py": "finds a class by its name, for FSDP's own wrapping",
    "transformers/integrations/accelerate.py": "device_map, which is refused",
    "transformers/integrations/finegrained_fp8.py": "quantised layers, which are refused",
    "transformers/integrations/integration_utils.py": "names a model in a log",
    "transformers/quantizers/*": "quantised layers, which are refused",
    "transformers/exporters/*": "export to other runtimes, of models that are not sharded",
    "transformers/cli/*": "serves models that are not sharded",
    "transformers/model_debugging_utils.py": "names a file",
    "transformers/testing_utils.py": "tests of transformers",
    "accelerate/accelerator.py": "names modules of FSDP1 in a warning",
    "accelerate/hooks.py": "device_map, which is refused",
    "accelerate/utils/modeling.py": "device_map, which is refused; quantised layers",
    "accelerate/utils/dataclasses.py": "Megatron; finds a class by its name, for FSDP's wrapping",
    "accelerate/utils/fsdp_utils.py": "Accelerate's own sharding, which ours stands in for",
    "peft/peft_model.py": "get_model_status() names the model",
    "peft/tuners/*": "what kind of layer an adapter is put on, before sharding; DoRA",
    "peft/utils/other.py": "FSDP's own wrapping",
    "lightning/fabric/utilities/init.py": "names modules in an error",
    "lightning/pytorch/trainer/configuration_validator.py": "names the module in an error",
    "lightning/pytorch/utilities/model_summary/model_summary.py": "a row of ModelSummary",
}
MARKS = {
    "transformers/distributed/fsdp.py": "where the mark is read, and set for its own sharding",
    "transformers/models/*": "every layer runs, also those that LayerDrop leaves out: hidden there",
    "transformers/models/dia/generation_dia.py": "generation in step: ours does the same",
    "transformers/generation/utils.py": "generation in step: dist/test_generation.py",
    "transformers/trainer_seq2seq.py": "generation in step: hf_trainer/test_trainer.py",
    "transformers/trainer.py": "its own sharded loading, which is refused; reshard() is harmless",
    "accelerate/utils/fsdp_utils.py": "Accelerate's own sharding, which ours stands in for",
    "trl/models/utils.py": "a reference model that is sharded already is not sharded again",
    "lightning/fabric/strategies/model_parallel.py": "another strategy",
}
_NAME = re.compile(
    r"\b(?:\w*model|\w*module|model_to_save|get_base_model\(\))\.__class__\.__name__"
    r"|type\((?:self\.)?\w*(?:model|module)\)\.__name__|\w\._get_name\(\)"
)
_MARK = re.compile(r"is_fsdp_managed_module\(|_is_fsdp_managed_module|\bFSDPModule\b")
_WORDS = ("__name__", "_get_name()", "is_fsdp_managed_module", "FSDPModule", "layerdrop")
"""Each match of the two holds one of these, which are found faster."""
_TEXT = re.compile(r"""\{[^}]*__name__|f["'].*__name__|^\s*(?:from|import|#|>>>)""")


@functools.cache
def sources(package: str) -> list[tuple[str, str]]:
    """Name and code of each file of a package that has a word, without what is only said."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        if "test_utils" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            if not any(word in text for word in _WORDS):
                continue
            code = "\n".join(line for line in text.splitlines() if not _TEXT.search(line))
            found.append((path.relative_to(root.parent).as_posix(), code))
    return found


@pytest.mark.parametrize("package", VERSIONS)
def test_every_place_is_listed(package: str) -> None:
    installed = importlib.metadata.version(package)
    if not installed.startswith(VERSIONS[package] + "."):
        pytest.skip(f"the lists are for {package} {VERSIONS[package]}, installed is {installed}")
    for pattern, places in ((_NAME, NAMES), (_MARK, MARKS)):
        files = [name for name, code in sources(package) if pattern.search(code)]
        unlisted = [name for name in files if not any(fnmatch(name, p) for p in places)]
        assert not unlisted, "read what these do with a sharded model, and list them"
        ours = [place for place in places if place.startswith(f"{package}/")]
        gone = [place for place in ours if not any(fnmatch(name, place) for name in files)]
        assert not gone, "these do not read it any more"
        assert bool(files) == bool(ours)


def test_models_read_the_mark_for_layer_drop_and_generation_only() -> None:
    readers = drawing = 0
    for name, code in sources("transformers"):
        if not fnmatch(name, "transformers/models/*/modeling_*.py"):
            continue
        if "layerdrop" not in code and "is_fsdp_managed_module(" not in code:
            continue
        for node in ast.walk(ast.parse("\n".join(_readable(name)))):
            if not isinstance(node, ast.FunctionDef):
                continue
            words = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            words |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
            drops = any(word.endswith("layerdrop") for word in words)
            if "is_fsdp_managed_module" in words:
                assert node.name == "forward" and drops, f"{name}: {node.name}"
                readers += 1
            if node.name == "forward" and drops and "rand" in words:
                drawing += 1
    assert readers > 10 and drawing > 50


def _readable(name: str) -> list[str]:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent.parent / name
    return file.read_text(encoding="utf-8").splitlines()


# ------------------------------------------------------------------ names


class Outer:
    class Model(nn.Module):
        """Of a class within a class, with a list of blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in "ab")

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            """x: (b, 4) -> (b, 4)."""
            for block in self.blocks:
                x = block(x)
            return x * scale


def names(stage: int) -> None:
    from transformers import LlamaForCausalLM
    from transformers.distributed.fsdp import is_fsdp_managed_module

    cases: list[tuple[Any, type, Any]] = [
        (build, LlamaForCausalLM, "auto"),
        (Outer.Model, Outer.Model, ("Sequential",)),
    ]
    for make, kind, units in cases:
        engine, plain, model = ZeroEngine(ZeroConfig(stage=stage, units=units)), make(), make()
        engine.shard(model)
        assert sum(isinstance(m, FSDPModule) for m in model.modules()) > 1
        assert repr(model) == repr(plain)
        for one, other in zip(model.modules(), plain.modules(), strict=True):
            for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
                assert getattr(type(one), attribute) == getattr(type(other), attribute)
            assert isinstance(one, type(other)) and one._get_name() == other._get_name()
            assert inspect.signature(one.forward) == inspect.signature(other.forward)
        assert isinstance(model, kind) and is_fsdp_managed_module(model)
        for refused in (copy.deepcopy, pickle.dumps, copy.copy):
            with pytest.raises(ScheduleError, match=r"full_state_dict\(\)"):
                refused(model)
    assert type(model.blocks[0][:1]) is nn.Sequential  # parts of a container are plain ones
    assert model.to("cpu") is model  # torch refuses DTensors that have a weak reference
    # Other code in the process may shard by itself, and finds the class that torch names.
    other = torch.distributed.fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    assert type(other).__name__ == "FSDPSequential"


def test_sharded_modules_are_called_as_before(pool: RankPool) -> None:
    pool.run(names, 2, 3)


# ------------------------------------------------------------------ LayerDrop


def speech(layerdrop: float) -> Any:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 8}
    depth = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_feat_extract_layers": 2}
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (4, 4)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    none = dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "mask_time_prob"), 0.0
    )
    none |= {"feat_proj_dropout": 0.0, "final_dropout": 0.0}
    config = Wav2Vec2Config(
        **sizes, **depth, **convolutions, **positions, **none, layerdrop=layerdrop
    )
    config.ctc_loss_reduction = "mean"
    return Wav2Vec2ForCTC(config).train()


def layers_of(model: Any) -> list[int]:
    """The layers that run, in the order in which they do."""
    calls: list[int] = []
    for index, layer in enumerate(model.wav2vec2.encoder.layers):
        layer.register_forward_hook(lambda *_, i=index: calls.append(i))
    return calls


def layer_drop(stage: int) -> None:
    engine = ZeroEngine(ZeroConfig(stage=stage))
    model, plain = speech(0.5), speech(0.5)
    engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    reference = torch.optim.SGD(plain.parameters(), lr=0.01)
    ours, theirs = layers_of(model), layers_of(plain)
    generator = torch.Generator().manual_seed(5)
    world_size = engine.world_size
    for step in range(4):
        sound = torch.randn(2, world_size, 400, generator=generator)
        labels = torch.randint(1, 8, (2, world_size, 4), generator=generator)
        torch.manual_seed(step + 100 * engine.rank)  # rank 0's numbers count
        for micro in (0, 1):
            with engine.micro_step(last=micro == 1):
                rows = slice(engine.rank, engine.rank + 1)
                loss = model(sound[micro, rows], labels=labels[micro, rows]).loss
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(step)
        for micro in (0, 1):
            (plain(sound[micro], labels=labels[micro]).loss / 2).backward()
        reference.step()
        reference.zero_grad()
    assert ours == theirs and 0 < len(ours) < 4 * 2 * 4
    for name, value in engine.full_state_dict(rank0_only=False).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    torch.manual_seed(engine.rank)
    drawn = torch.rand(1)
    torch.manual_seed(engine.rank)
    assert torch.equal(drawn, torch.rand(1))  # outside of the model each rank draws its own


class Drops(nn.Module):
    """Draws from Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.5
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 4) -> (b, 4)."""
        import random

        for block in self.blocks:
            if not self.training or random.uniform(0, 1) >= self.layerdrop:
                x = block(x)
        return x


def draws_elsewhere() -> None:
    engine, model = ZeroEngine(ZeroConfig(stage=3)), Drops()
    engine.shard(model)
    with raises_everywhere(ModelError, "layerdrop=0 in the model (Drops)", "Python's or numpy's"):
        model(torch.ones(2, 4))
    engine.reset()
    with torch.no_grad():
        model.eval()(torch.ones(2, 4))
    model.train().layerdrop = 0.0
    model(torch.ones(2, 4)).sum().backward()


def with_layer_drop() -> None:
    for stage in (1, 2, 3):
        layer_drop(stage)
    draws_elsewhere()
    dist.barrier()


def test_layer_drop_leaves_out_the_same_layers_as_one_process(pool: RankPool) -> None:
    pool.run(with_layer_drop, 2)
