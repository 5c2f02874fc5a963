"""Models that are read as they are sharded: what each rank then has, and how they train."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaModel

import shardplug.hf
from shardplug import CheckpointError, ModelError, ZeroConfig, ZeroEngine
from shardplug.core.weights.origin import source_dtypes
from shardplug.integrations.hf.stored import FileTensor
from tests.adapters.hf.models import (
    assert_equal,
    assert_equal_buffers,
    save_llama,
    theirs,
    tokens,
)
from tests.support.parity import assert_sharded, raises_everywhere

FOLDERS = [(tied, size) for tied in (False, True) for size in ("5GB", "50KB")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, str], str]:
    root = tmp_path_factory.mktemp("llamas")
    made = {}
    for tied, size in FOLDERS:
        path = save_llama(root / f"{tied}-{size}", tied=tied, max_shard_size=size)
        made[tied, size] = str(path)
        assert (path / "model.safetensors.index.json").is_file() == (size == "50KB")
    return made


def engine(stage: int = 3, **options: Any) -> ZeroEngine:
    return ZeroEngine(ZeroConfig(stage=stage, **options))  # type: ignore[arg-type]


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    blocks = [torch.full((n,), float("nan")) for n in (4, 8, 16, 1000, 2_500_000) for _ in range(9)]
    assert all(bool(block.isnan().all()) for block in blocks)


# -- Values ---------------------------------------------------------------------------------------


def check_values(folders: dict[tuple[bool, str], str], stage: int) -> int:
    compared = 0
    for (tied, _), folder in folders.items():
        torch.manual_seed(100 + dist.get_rank())
        reference = theirs(folder)
        assert reference.dtype == torch.bfloat16

        poison()
        masters = engine(stage, param_dtype="bf16")
        model = shardplug.hf.from_pretrained(folder)
        assert all(parameter.is_meta for parameter in model.parameters())
        masters.shard(model)
        assert_sharded(model)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        whole = masters.full_state_dict(model, rank0_only=False)
        assert_equal(whole, reference.state_dict(), cast=True)
        assert_equal_buffers(model, reference)

        poison()
        plain = engine(stage)
        model = plain.shard(shardplug.hf.from_pretrained(folder, dtype=torch.float32))
        reference = theirs(folder, dtype=torch.float32)
        assert_equal(plain.full_state_dict(model, rank0_only=False), reference.state_dict())
        assert_equal_buffers(model, reference)
        with torch.no_grad():
            ours = model(tokens(dist.get_rank())).logits
            assert torch.equal(ours, reference(tokens(dist.get_rank())).logits)
        compared += len(whole)
    return compared


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_and_buffers_are_those_of_transformers(pool, folders, world_size, stage):
    chosen = [(False, "50KB"), (True, "5GB")] if stage == 1 else FOLDERS
    folders = {key: folders[key] for key in chosen}
    assert min(pool.run(check_values, world_size, folders, stage)) > 20 * len(folders)


def check_other_layouts(folder: str) -> None:
    reference = theirs(folder, dtype=torch.float32)
    halves = engine(replicate_size=2)
    model = halves.shard(shardplug.hf.from_pretrained(folder, dtype=torch.float32))
    assert_equal(halves.full_state_dict(model, rank0_only=False), reference.state_dict())

    pure = engine()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = pure.shard(shardplug.hf.from_pretrained(folder))
    assert any("keeps no fp32 master" in str(w.message) for w in caught) == (dist.get_rank() == 0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}

    frozen = shardplug.hf.from_pretrained(folder)
    frozen.requires_grad_(False)
    frozen.lm_head.requires_grad_(True)
    mixed = engine(param_dtype="bf16")
    mixed.shard(frozen)
    assert frozen.lm_head.weight.dtype == torch.float32
    assert frozen.model.norm.weight.dtype == torch.bfloat16
    assert_equal(
        mixed.full_state_dict(frozen, rank0_only=False), theirs(folder).state_dict(), cast=True
    )
    noted = source_dtypes(frozen)
    assert {noted[name] for name, _ in frozen.named_parameters()} == {torch.bfloat16}


def test_replicas_pure_bf16_and_frozen_parts(pool, folders):
    pool.run(check_other_layouts, 4, folders[False, "50KB"])


class AllTraffic(TorchDispatchMode):
    """Sums the bytes of every tensor that is handed to a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        name = func._schema.name
        if name.startswith("c10d::") and name != "c10d::recv_":  # some are there for errors only
            leaves = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.bytes[name] += sum(t.numel() * t.element_size() for t in leaves)
        return func(*args, **(kwargs or {}))


def check_nothing_is_sent(folder: str) -> dict[str, int]:
    sharding = engine(param_dtype="bf16")
    model = shardplug.hf.from_pretrained(folder)
    with AllTraffic() as traffic:
        sharding.shard(model)
    assert all(int(t.numel()) for t in model.parameters())
    return dict(traffic.bytes)


def test_no_weight_is_sent_between_ranks(pool, folders):
    for sent in pool.run(check_nothing_is_sent, 2, folders[False, "5GB"]):
        assert 0 < sent["c10d::broadcast_"] <= 64, sent  # the rotary frequencies
        assert sum(sent.values()) <= 4096, sent  # ranks compare names, and agree that all is read


# -- Failures -------------------------------------------------------------------------------------


def check_faults(folder: str, lost: str, cut: str) -> None:
    rank = dist.get_rank()
    model = shardplug.hf.from_pretrained(lost)
    file = Path(lost) / "model.safetensors"
    dist.barrier()
    if rank == 0:
        file.unlink()
    dist.barrier()
    with raises_everywhere(CheckpointError, "model.safetensors cannot be read"):
        engine().shard(model)

    model = shardplug.hf.from_pretrained(cut)
    file = Path(cut) / "model.safetensors"
    dist.barrier()
    if rank == 0:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 64)
    dist.barrier()
    with raises_everywhere(CheckpointError, "model.safetensors is damaged"):
        engine().shard(model)

    model = shardplug.hf.from_pretrained(folder)
    if rank == 1:  # a disk that fails under one rank, in the middle
        original = FileTensor._read

        def broken(self: FileTensor, file: Any, view: memoryview) -> None:
            if "layers.1.mlp.up_proj" in self.name:
                raise OSError(5, "Input/output error")
            original(self, file, view)

        FileTensor._read = broken  # type: ignore[method-assign]
    try:
        with raises_everywhere(
            CheckpointError, "rank 1", "layers.1.mlp.up_proj.weight", "Input/output error"
        ):
            engine().shard(model)
    finally:
        if rank == 1:
            FileTensor._read = original  # type: ignore[method-assign]

    model = shardplug.hf.from_pretrained(folder) if rank else theirs(folder)
    with raises_everywhere(ModelError, "read from files"):
        engine().shard(model)


def test_every_rank_raises_what_one_met(pool, tmp_path):
    paths = [str(save_llama(tmp_path / name)) for name in ("whole", "lost", "cut")]
    pool.run(check_faults, 3, *paths)


def check_changed_models(folder: str) -> None:
    model = shardplug.hf.from_pretrained(folder)
    model.to_empty(device="cpu")
    with raises_everywhere(ModelError, "to_empty", "load_pretrained(model)"):
        engine().shard(model)

    model = shardplug.hf.from_pretrained(folder)
    model.resize_token_embeddings(300, mean_resizing=False)
    with raises_everywhere(ModelError, "(257, 32)", "(300, 32)", "resize it"):
        engine().shard(model)

    model = shardplug.hf.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(11)
    model.lm_head = nn.Linear(32, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine().shard(model)
    said = [str(w.message) for w in caught if "have values" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)
    torch.manual_seed(11)
    wanted = nn.Linear(32, 5)
    assert torch.equal(model.lm_head.weight.full_tensor(), wanted.weight)
    assert torch.equal(
        model.model.norm.weight.full_tensor(), theirs(folder).model.norm.weight.float()
    )


def test_models_changed_before_sharding(pool, folders):
    pool.run(check_changed_models, 2, folders[False, "5GB"])


def check_copies_and_wrappers(folder: str) -> None:
    wanted = theirs(folder, dtype=torch.float32).state_dict()
    original = shardplug.hf.from_pretrained(folder, dtype=torch.float32)
    reference = copy.deepcopy(original)  # as DPO makes one
    original.model.layers = original.model.layers[:1]  # the rest is not wanted
    both = engine()
    for model in (reference, original):
        both.shard(model)
        state = both.full_state_dict(model, rank0_only=False)
        assert len(state) > 15
        assert_equal(state, {name: value for name, value in wanted.items() if name in state})
    assert len(both.full_state_dict(reference, rank0_only=False)) == len(wanted)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = shardplug.hf.from_pretrained(folder, dtype=torch.float32)
            self.scale = nn.Parameter(torch.tensor(1.5))
            with torch.device("meta"):
                self.value_head = nn.Linear(32, 1)

    wrapper = Wrapper().to(torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine().shard(wrapper)
    said = [str(w.message) for w in caught if "newly initialised" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)
    assert all("value_head.weight, value_head.bias." in text for text in said)
    assert wrapper.llama.lm_head.weight.dtype == torch.float64
    assert torch.equal(
        wrapper.llama.lm_head.weight.full_tensor(), wanted["lm_head.weight"].double()
    )
    head = wrapper.value_head.weight.detach().full_tensor()
    heads = [torch.empty_like(head) for _ in range(dist.get_world_size())]
    dist.all_gather(heads, head)
    assert all(torch.equal(head, other) for other in heads)
    assert 0 < float(head.abs().max()) <= 32**-0.5


def test_copies_wrappers_and_new_heads(pool, folders):
    pool.run(check_copies_and_wrappers, 2, folders[False, "50KB"])


# -- LoRA, as PEFT builds it ----------------------------------------------------------------------


class LoraLinear(nn.Module):
    """The names and the initialisation of PEFT's layer."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.reset_lora_parameters("default", True)
        self.lora_A.to(base.weight.device)  # PEFT moves adapters to where the layer is
        self.lora_B.to(base.weight.device)

    def reset_lora_parameters(self, adapter: str, kind: Any) -> None:
        if kind is True:
            nn.init.kaiming_uniform_(self.lora_A[adapter].weight, a=5**0.5)
        else:
            nn.init.normal_(self.lora_A[adapter].weight, std=1 / 3)
        nn.init.zeros_(self.lora_B[adapter].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class ModulesToSave(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})
        self.modules_to_save.requires_grad_(True)

    @property
    def weight(self) -> torch.Tensor:
        return self.modules_to_save["default"].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.modules_to_save["default"](x)


class AdapterConfig:
    def __init__(self, init: Any) -> None:
        self.init_lora_weights = init

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class Adapted(nn.Module):
    def __init__(self, model: Any, init: Any = True) -> None:
        super().__init__()
        self.peft_config = {"default": AdapterConfig(init)}
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
        model.lm_head = ModulesToSave(model.lm_head)
        self.base_model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_model(x).logits

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir()
        names = select(self, {name: name for name in self.state_dict()})
        tensors = self.state_dict()
        save_file(
            {theirs: tensors[ours].clone() for theirs, ours in names.items()},
            Path(folder) / "adapter_model.safetensors",
        )


def select(model: nn.Module, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
    """What PEFT's get_peft_model_state_dict does."""
    return {
        name.replace(".default", "").replace(".modules_to_save", ""): value
        for name, value in state_dict.items()
        if ".lora_" in name or ".modules_to_save." in name
    }


def check_trained_adapter(folder: str, saved: str) -> None:
    sys.modules["peft"] = types.SimpleNamespace(get_peft_model_state_dict=select)  # type: ignore[assignment]
    try:
        whole = Adapted(theirs(folder, dtype=torch.float32))
        shardplug.hf.load_pretrained(whole, saved)
        with torch.no_grad():
            wanted = whole(tokens(0))

        early = Adapted(shardplug.hf.from_pretrained(folder, dtype=torch.float32))
        assert shardplug.hf.load_pretrained(early, saved) == shardplug.hf.LoadReport()
        assert all(p.is_meta for p in early.parameters())
        engine().shard(early)  # no warning: nothing is new
        late = Adapted(shardplug.hf.from_pretrained(folder, dtype=torch.float32))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine().shard(late)
        said = [str(w.message) for w in caught if "A trained adapter is read by" in str(w.message)]
        assert len(said) == (dist.get_rank() == 0)
        assert not torch.equal(late(tokens(0)), wanted)
        shardplug.hf.load_pretrained(late, saved)
        for model in (early, late):
            with torch.no_grad():
                assert torch.equal(model(tokens(0)), wanted)
        plain = theirs(folder)
        with raises_everywhere(CheckpointError, "Expected a model with one adapter"):
            shardplug.hf.load_pretrained(plain, saved)
    finally:
        del sys.modules["peft"]


def test_trained_adapter_is_read_before_or_after_sharding(pool, folders, tmp_path):
    torch.manual_seed(4)
    model = Adapted(theirs(folders[False, "5GB"], dtype=torch.float32))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(str(tmp_path / "adapter"))
    pool.run(check_trained_adapter, 2, folders[False, "5GB"], str(tmp_path / "adapter"))


def check_lora(folder: str) -> None:
    reference = theirs(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(tokens(dist.get_rank())).logits
    for init in (True, "gaussian"):
        model = Adapted(shardplug.hf.from_pretrained(folder, dtype=torch.float32), init)
        assert all(p.is_meta for p in model.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine().shard(model)
        said = [str(w.message) for w in caught if "newly initialised" in str(w.message)]
        assert len(said) == (dist.get_rank() == 0)
        assert all("lora_A" in text and "base_layer" not in text for text in said)
        with torch.no_grad():
            assert torch.equal(model(tokens(dist.get_rank())), wanted)  # B is zero, the copy equal
        names = dict(model.named_parameters())
        first = names["base_model.model.layers.0.self_attn.q_proj.lora_A.default.weight"]
        assert float(first.full_tensor().abs().max()) > 0
        assert names["base_model.lm_head.modules_to_save.default.weight"].requires_grad
        model(tokens(0)).sum().backward()
    model = Adapted(shardplug.hf.from_pretrained(folder, dtype=torch.float32), "pissa")
    with raises_everywhere(ModelError, "'pissa'", "load_pretrained(model)"):
        engine().shard(model)


def test_adapters_put_into_a_model_on_meta(pool, folders):
    pool.run(check_lora, 2, folders[False, "5GB"])


# -- load_pretrained on sharded models ------------------------------------------------------------


def check_load_into_shards(folder: str, other: str, base: str) -> None:
    for stage in (1, 3):
        zero = engine(stage, param_dtype="bf16")
        model = zero.shard(shardplug.hf.from_pretrained(folder, dtype=torch.float32))
        report = shardplug.hf.load_pretrained(model, other)
        assert report == shardplug.hf.LoadReport()
        state = zero.full_state_dict(model, rank0_only=False)
        assert_equal(state, theirs(other, dtype=torch.float32).state_dict())
        assert not torch.equal(state["lm_head.weight"], theirs(folder).lm_head.weight.float())

        with raises_everywhere(CheckpointError, "not in the files: lm_head.weight (257, 32)"):
            shardplug.hf.load_pretrained(model, base)
        report = shardplug.hf.load_pretrained(model, base, strict=False)
        assert report.missing == ("lm_head.weight",) and not report.unexpected
        state = zero.full_state_dict(model, rank0_only=False)
        assert torch.equal(
            state["lm_head.weight"], theirs(other, dtype=torch.float32).lm_head.weight
        )
        assert torch.equal(
            state["model.norm.weight"], theirs(base, LlamaModel, dtype=torch.float32).norm.weight
        )
    with raises_everywhere(CheckpointError, "got nothing at", "nowhere"):
        shardplug.hf.load_pretrained(model, "./nowhere")


def test_load_into_a_sharded_model(pool, folders, tmp_path):
    other = save_llama(tmp_path / "other", dtype=torch.float32, max_shard_size="50KB", seed=9)
    theirs(str(save_llama(tmp_path / "lm", seed=8))).model.save_pretrained(tmp_path / "base")
    pool.run(check_load_into_shards, 3, folders[False, "5GB"], str(other), str(tmp_path / "base"))


# -- Training -------------------------------------------------------------------------------------


def two_steps(model: Any, stage: int) -> dict[str, torch.Tensor]:
    zero = engine(stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero.shard(model.train())
    zero.prepare_optimizer(optimizer)  # made from parameters on meta
    for step in range(2):
        batch = tokens(10 * step + dist.get_rank())
        with zero.micro_step():
            model(batch, labels=batch).loss.backward()
        zero.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(model, rank0_only=False)


def check_engine_training(folder: str) -> None:
    start = theirs(folder, dtype=torch.float32).state_dict()
    for stage in (1, 3):
        ours = two_steps(shardplug.hf.from_pretrained(folder, dtype=torch.float32), stage)
        wanted = two_steps(theirs(folder, dtype=torch.float32), stage)
        assert_equal(ours, wanted)
        assert not torch.equal(ours["lm_head.weight"], start["lm_head.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_training_is_that_after_loading_with_transformers(pool, folders, tied):
    pool.run(check_engine_training, 2, folders[tied, "50KB"])


def fit(model: Any) -> dict[str, torch.Tensor]:
    from torch.utils.data import DataLoader

    from tests.adapters.lightning.modules import pl, trainer, whole

    class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.llama = model.train()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.llama(batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    trainer("zero3", max_steps=2).fit(module, DataLoader(tokens(5, rows=8), batch_size=2))
    return whole(module.llama)


def check_trainer(folder: str) -> None:
    ours = fit(shardplug.hf.from_pretrained(folder, dtype=torch.float32))
    assert_equal(ours, fit(theirs(folder, dtype=torch.float32)))
    assert not torch.equal(ours["lm_head.weight"], theirs(folder).lm_head.weight.float())


def test_lightning_trainer_reads_the_model(pool, folders):
    pool.run(check_trainer, 2, folders[False, "50KB"])


def accelerated(model: Any) -> dict[str, torch.Tensor]:
    from tests.adapters.accelerate.common import accelerator, loader

    accelerate = accelerator(zero="zero3", cpu=True)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    model, optimizer, batches = accelerate.prepare(model, optimizer, loader(tokens(5, rows=8)))
    for batch in batches:
        accelerate.backward(model(batch, labels=batch).loss)
        accelerate.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return accelerate.engine.full_state_dict(model, rank0_only=False)


def check_accelerator(folder: str) -> None:
    ours = accelerated(shardplug.hf.from_pretrained(folder, dtype=torch.float32))
    assert_equal(ours, accelerated(theirs(folder, dtype=torch.float32)))
    assert not torch.equal(ours["lm_head.weight"], theirs(folder).lm_head.weight.float())


def test_accelerator_reads_the_model(pool, folders):
    pool.run(check_accelerator, 2, folders[True, "5GB"])


def test_auto_class_is_the_default():
    assert shardplug.hf.from_pretrained.__kwdefaults__["auto_class"] is AutoModelForCausalLM
