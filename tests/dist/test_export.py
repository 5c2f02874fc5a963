"""Weights out: Hugging Face folders from checkpoints and from live models."""

from __future__ import annotations

import errno
import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import export, export_model
from shardplug.checkpoint.export.export_folder import TensorFile
from shardplug.errors import CheckpointError, ConfigError
from tests.support.models import VOCAB, TinyLM, tokens
from tests.support.parity import raises_everywhere, whole
from tests.support.pool import RankPool

MIB = 2**20


def llama(*, tied: bool = True, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> nn.Module:
    """A tiny Llama; its vocabulary is a prime, so rows never divide evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        initializer_range=0.3,  # greedy text that depends on the weights
    )
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(config).to(dtype)
    return model


def _train(engine: ZeroEngine, model: nn.Module, steps: int = 2) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(parameters, 1e-2))
    for step in range(steps):
        with engine.micro_step():
            batch = tokens(step, 0, engine.rank)
            out = model(input_ids=batch, labels=batch)
            out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Read all safetensors of a folder with the reference reader; each name is in one file."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
            for name in opened.keys():  # noqa: SIM118  # not a dictionary
                assert name not in found
                found[name] = opened.get_tensor(name)
    assert found
    return found


def reloaded(folder: Path, **options: Any) -> nn.Module:
    """Load with transformers; nothing is missing, unexpected or of another shape."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, **options
    )
    assert not any(info.values()), info
    result: nn.Module = model
    return result


def greedy(model: nn.Module) -> list[int]:
    """Return 16 greedy tokens."""
    prompt = tokens(0, 0, 0, batch=1, length=5)
    with torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
        )
    found: list[int] = out[0, 5:].tolist()
    return found


def exported(checkpoint: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Export and read; warnings about the tokenizer are expected here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no tokenizer was found")
        assert export(checkpoint, out, **options) == out
    assert not list(out.parent.glob(".*.export-*"))
    return tensors_in(out)


# -- From a checkpoint ----------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Keeps a Hugging Face model as a LightningModule does, its config too."""

    def __init__(self, llama: nn.Module) -> None:
        super().__init__()
        self.config = llama.config
        self.llama = llama
        self.other = nn.Linear(3, 2)

    def forward(self, **inputs: Any) -> Any:
        return self.llama(**inputs)


def _save_tied(root: str, wrapped: bool) -> dict[str, torch.Tensor]:
    inner = llama()
    model = Wrapped(inner) if wrapped else inner
    engine = ZeroEngine(ZeroConfig(stage=3, param_dtype=torch.bfloat16))
    engine.shard(model)
    assert {p.dtype for p in inner.parameters()} == {torch.float32}
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.mul_(1.001)  # masters that bf16 does not hold
    engine.save(f"{root}/ckpt")
    return {name: whole(p) for name, p in inner.named_parameters()}


@pytest.mark.parametrize("wrapped", [False, True])
def test_case_39_tied_bf16_model(pool: RankPool, tmp_path: Path, wrapped: bool) -> None:
    """Tied tensors once, in the dtype the model came in, and from_pretrained gets the same text."""
    trained = pool.run(_save_tied, 2, str(tmp_path), wrapped)[0]
    found = exported(tmp_path / "ckpt", tmp_path / "out")
    assert sorted(found) == sorted(trained) and "lm_head.weight" not in found
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, trained[name].bfloat16())
    numel = sum(tensor.numel() for tensor in found.values())
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0 < size - 2 * numel < 4096, "more than the weights and a header"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], "_name_or_path" in config) == ("bfloat16", False)

    reference = llama(dtype=torch.float32)
    reference.load_state_dict({n: t.bfloat16().float() for n, t in trained.items()}, strict=False)
    model = reloaded(tmp_path / "out", dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    text = greedy(model)
    assert text == greedy(reference) and len(text) == 16
    assert text != greedy(llama(dtype=torch.float32, seed=8))

    wide = exported(tmp_path / "ckpt", tmp_path / "fp32", dtype="float32")
    assert all(torch.equal(wide[name], trained[name].float()) for name in trained)
    assert reloaded(tmp_path / "fp32").dtype == torch.float32


def _save_mixed(root: str) -> dict[str, torch.Tensor]:
    model = llama(tied=False)
    for name, module in model.named_modules():
        if "norm" in name:
            module.float()
    model.model.register_buffer("seen", torch.tensor([3, 4]))
    engine = ZeroEngine(ZeroConfig(stage=2, param_dtype=torch.bfloat16))
    engine.shard(model)
    engine.save(f"{root}/ckpt")
    for index, options in enumerate(({}, {"max_shard_bytes": 20_000}, {"dtype": "float16"})):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no tokenizer was found")
            export_model(engine, f"{root}/live{index}", **options)
    return {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_case_11_each_dtype_as_it_came_in(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    """bf16 matrices, fp32 norms, integers; and a live model is written as its checkpoint is."""
    state = pool.run(_save_mixed, world_size, str(tmp_path))[0]
    found = exported(tmp_path / "ckpt", tmp_path / "out0")
    assert len(found) == len(state) == 22
    for name, tensor in found.items():
        expected = torch.float32 if "norm" in name else torch.bfloat16
        assert tensor.dtype == (torch.int64 if name.endswith("seen") else expected), name
        assert torch.equal(tensor, state[name].to(tensor.dtype)), name
    parts = exported(tmp_path / "ckpt", tmp_path / "out1", max_shard_bytes=20_000)
    assert parts.keys() == found.keys()
    assert all(torch.equal(parts[name], found[name]) for name in found)
    half = exported(tmp_path / "ckpt", tmp_path / "out2", dtype=torch.float16)
    assert {t.dtype for t in half.values()} == {torch.float16, torch.int64}

    index = json.loads((tmp_path / "out1" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    files = sorted(path.name for path in (tmp_path / "out1").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) >= 3 and set(index["weight_map"].values()) == set(files)

    compared = 0
    for number in range(3):
        ours, live = tmp_path / f"out{number}", tmp_path / f"live{number}"
        names = sorted(path.name for path in ours.iterdir())
        assert names == sorted(path.name for path in live.iterdir())
        for name in names:
            assert (ours / name).read_bytes() == (live / name).read_bytes(), name
            compared += 1
    assert compared >= 12


class Pair(nn.Module):
    """Two Hugging Face models in one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = llama(seed=1)
        self.b = llama(seed=2)

    def forward(self, **inputs: Any) -> Any:
        return self.a(**inputs), self.b(**inputs)


def _save_several(root: str) -> None:
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(Pair())
    engine.shard(TinyLM())
    engine.save(f"{root}/two")
    plain = ZeroEngine(ZeroConfig(stage=3))
    plain.shard(TinyLM())
    plain.save(f"{root}/plain")


def test_which_part_is_exported(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_several, 2, str(tmp_path))
    with pytest.raises(ConfigError, match=r"there are 2\. Choose one .*'a\.', 'b\.'"):
        export(tmp_path / "two", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    a = exported(tmp_path / "two", tmp_path / "a", module="a")
    b = exported(tmp_path / "two", tmp_path / "b", module="b.")
    assert a.keys() == b.keys()
    assert not torch.equal(a["model.embed_tokens.weight"], b["model.embed_tokens.weight"])
    assert reloaded(tmp_path / "b") is not None
    with pytest.raises(ConfigError, match="beginning of names, got 'c'; there are a., b."):
        export(tmp_path / "two", tmp_path / "out", module="c")
    with pytest.raises(ConfigError, match="of 2 models, got 'model2::a'"):
        export(tmp_path / "two", tmp_path / "out", module="model2::a")

    with pytest.warns(UserWarning, match="no Hugging Face configuration was found"):
        export(tmp_path / "two", tmp_path / "part", module="model1::blocks.0")
    assert sorted(tensors_in(tmp_path / "part"))[0] == "down.weight"
    with pytest.warns(UserWarning, match="only the weights are written"):
        export(tmp_path / "plain", tmp_path / "plain-out")
    assert [path.name for path in (tmp_path / "plain-out").iterdir()] == ["model.safetensors"]
    assert len(tensors_in(tmp_path / "plain-out")) == 20


def test_a_folder_of_another_tool_is_converted(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = llama(tied=False, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    with pytest.warns(UserWarning, match="no Hugging Face configuration"):
        export(tmp_path / "dcp", tmp_path / "out", dtype="bfloat16")
    found = tensors_in(tmp_path / "out")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[n], t.bfloat16()) for n, t in model.state_dict().items())
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    again = exported(tmp_path / "hf", tmp_path / "half", dtype="float16")
    assert all(torch.equal(again[n], t.half()) for n, t in model.state_dict().items())
    assert reloaded(tmp_path / "half").dtype == torch.float16


# -- Tokenizer, paths, failures -------------------------------------------------------------------


def _save_one(root: str, origin: str) -> None:
    model = llama()
    model.config._name_or_path = origin
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(model)
    engine.save(f"{root}/ckpt")


def test_tokenizer_files_come_along(pool: RankPool, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(tmp_path / "origin")
    (tmp_path / "origin" / "model.safetensors").write_bytes(b"not the tokenizer's")
    pool.run(_save_one, 1, str(tmp_path), str(tmp_path / "origin"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(tmp_path / "ckpt", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"] == [2]
    assert len(tensors_in(tmp_path / "out")) == 20

    shutil.move(tmp_path / "origin", tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="no tokenizer was found.*--tokenizer FOLDER.*origin"):
        export(tmp_path / "ckpt", tmp_path / "none")
    export(tmp_path / "ckpt", tmp_path / "given", tokenizer=tmp_path / "elsewhere")
    assert (tmp_path / "given" / "tokenizer.json").is_file()
    with pytest.raises(ConfigError, match="a folder with a tokenizer's files"):
        export(tmp_path / "ckpt", tmp_path / "wrong", tokenizer=tmp_path / "ckpt")
    assert not (tmp_path / "wrong").exists()


def test_what_is_there_is_not_lost(pool: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    pool.run(_save_one, 1, str(tmp_path), "")
    out = tmp_path / "out"
    exported(tmp_path / "ckpt", out)
    with pytest.raises(ConfigError, match="is not empty.*--overwrite"):
        export(tmp_path / "ckpt", out)
    exported(tmp_path / "ckpt", out, overwrite=True, max_shard_bytes=20_000)
    assert not (out / "model.safetensors").exists()
    exported(tmp_path / "ckpt", out, overwrite=True)
    assert not list(out.glob("*-of-*")) and not (out / "model.safetensors.index.json").exists()
    (out / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="holds other things too: README.md"):
        export(tmp_path / "ckpt", out, overwrite=True)
    with pytest.raises(ConfigError, match="holds other things too"):
        export(tmp_path / "ckpt", tmp_path / "ckpt", overwrite=True)
    with pytest.raises(ConfigError, match="is a file"):
        export(tmp_path / "ckpt", out / "README.md", overwrite=True)

    base = tmp_path / "base"  # a model that nobody exported
    base.mkdir()
    save_file({"w": torch.ones(2)}, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="base/model.safetensors was not written by an export"):
        export(tmp_path / "ckpt", base, overwrite=True)
    assert (base / "model.safetensors").is_file()

    (tmp_path / ".out.export-00000000").mkdir()  # of an export that was killed
    (out / "README.md").unlink()
    exported(tmp_path / "ckpt", out, overwrite=True)


def test_options_that_cannot_be_honoured(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_one, 1, str(tmp_path), "")
    for options, said in (
        ({"dtype": "int8"}, "Expected dtype to be 'source' or one of .*got 'int8'"),
        ({"max_shard_bytes": 0}, "Expected a positive size"),
        ({"adapter_only": True}, "Expected a model with PEFT adapters"),
    ):
        with pytest.raises(ConfigError, match=said):
            export(tmp_path / "ckpt", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_damaged_bytes_are_not_exported(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_one, 2, str(tmp_path), "")
    file = tmp_path / "ckpt" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged: __1_0\.distcp"):
        export(tmp_path / "ckpt", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_a_full_disk_leaves_nothing(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(_save_one, 1, str(tmp_path), "")
    exported(tmp_path / "ckpt", tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(self: TensorFile, tensor: torch.Tensor) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorFile, "write", full)
    with pytest.raises(CheckpointError, match="out could not be written: .*No space left"):
        export(tmp_path / "ckpt", tmp_path / "out", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def _full_disk(root: str) -> None:
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(llama())
    write, calls = TensorFile.write, [0]

    def full(self: TensorFile, tensor: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, tensor)

    TensorFile.write = full  # type: ignore[method-assign]
    try:
        with raises_everywhere(CheckpointError, "Exporting failed on rank 0", "No space left"):
            export_model(engine, f"{root}/out")
    finally:
        TensorFile.write = write  # type: ignore[method-assign]
    dist.barrier()
    assert not list(Path(root).iterdir())
    with raises_everywhere(ConfigError, "Expected dtype"):
        export_model(engine, f"{root}/out", dtype="float3")
    Path(f"{root}/taken").write_text("x")
    with raises_everywhere(ConfigError, "is a file"):
        export_model(engine, f"{root}/taken")


def test_a_live_export_that_fails_fails_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_full_disk, 3, str(tmp_path))


# -- Adapters -------------------------------------------------------------------------------------


def _save_adapter(root: str, wrapped: bool) -> torch.Tensor:
    """Case 37: LoRA and whole trained modules on a frozen base."""
    import peft

    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    inner = peft.get_peft_model(llama(tied=False, dtype=torch.float32), config)
    model = Wrapped(inner) if wrapped else inner
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(model)
    _train(engine, model, steps=3)
    engine.save(f"{root}/ckpt")
    export_model(engine, f"{root}/live", adapter_only=True)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens(0, 0, 0)).logits
    return logits


@pytest.mark.parametrize("wrapped", [False, True])
def test_case_37_adapters_are_exported_whole(pool: RankPool, tmp_path: Path, wrapped: bool) -> None:
    peft = pytest.importorskip("peft")
    logits = pool.run(_save_adapter, 2, str(tmp_path), wrapped)[0]
    assert export(tmp_path / "ckpt", tmp_path / "out") == tmp_path / "out"
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        live = (tmp_path / "live" / name).read_bytes()
        assert live == (tmp_path / "out" / name).read_bytes()
    found = tensors_in(tmp_path / "out")
    assert len(found) == 2 * 2 * 2 + 2
    assert all(tensor.numel() for tensor in found.values())

    base = llama(tied=False, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        model = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    written = tmp_path / "by peft"
    model.save_pretrained(written)
    assert tensors_in(written).keys() == found.keys()
    model.eval()
    with torch.no_grad():
        again = model(input_ids=tokens(0, 0, 0)).logits
        plain = llama(tied=False, dtype=torch.float32)(input_ids=tokens(0, 0, 0)).logits
    assert (again - logits).abs().max() <= 1e-5
    assert (plain - logits).abs().max() > 1e-2, "the adapter changes nothing"


def _save_two_adapters(root: str) -> None:
    import peft

    model = peft.get_peft_model(
        llama(), peft.LoraConfig(target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    )
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(model)
    engine.save(f"{root}/ckpt")
    prompt = peft.get_peft_model(
        llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    other = ZeroEngine(ZeroConfig(stage=3))
    other.shard(prompt)
    other.save(f"{root}/prompt")


def test_several_adapters_and_those_that_only_peft_can_write(
    pool: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    pool.run(_save_two_adapters, 1, str(tmp_path))
    export(tmp_path / "ckpt", tmp_path / "out")
    first, second = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "out" / "second")
    assert len(first) == 2 * 3 and len(second) == 2 * 2
    assert not any("default" in name or "second" in name for name in [*first, *second])
    config = json.loads((tmp_path / "out" / "second" / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (2, "LORA")
    export(tmp_path / "ckpt", tmp_path / "out", overwrite=True)
    with pytest.raises(CheckpointError, match="PROMPT_TUNING.*save_pretrained"):
        export(tmp_path / "prompt", tmp_path / "out2")


# -- Memory ---------------------------------------------------------------------------------------


def _resident(key: str) -> int:
    """Return "VmRSS" or, since the last reset, the highest "VmHWM" of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {key}")


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


class Wide(nn.Module):
    """Layers of one size, in fp32."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _live_memory(root: str) -> int:
    engine = ZeroEngine(ZeroConfig(stage=3))
    warnings.filterwarnings("ignore", message=".*no Hugging Face configuration")
    small = ZeroEngine(ZeroConfig(stage=3))
    small.shard(TinyLM())
    export_model(small, f"{root}/small")  # what the first use of anything allocates
    model = engine.shard(Wide(1000, 20))
    assert sum(p.numel() * 4 for p in model.parameters()) == 80_000_000
    dist.barrier()
    before = _reset_peak()
    export_model(engine, f"{root}/out", max_shard_bytes=20_000_000)
    return _resident("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_case_20_live_export_of_80_mb_in_bounded_memory(pool: RankPool, tmp_path: Path) -> None:
    rises = pool.run(_live_memory, 4, str(tmp_path))
    largest, shard = 4_000_000, 20_000_000
    assert all(rise <= largest + 10_000_000 for rise in rises[1:]), rises
    assert rises[0] <= shard + largest, rises
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 4 and sum(file.stat().st_size for file in files) > 80_000_000


def _save_large(root: str) -> None:
    engine = ZeroEngine(ZeroConfig(stage=3))
    small = ZeroEngine(ZeroConfig(stage=3))
    small.shard(TinyLM())
    small.save(f"{root}/small")
    model = engine.shard(Wide(2048, 48))  # 201 M parameters
    assert sum(p.numel() for p in model.parameters()) > 200e6
    engine.save(f"{root}/ckpt")


def _checkpoint_memory(root: str, dtype: str, max_shard_bytes: int) -> int:
    warnings.filterwarnings("ignore", message=".*no Hugging Face configuration")
    export(f"{root}/small", f"{root}/small-out-{dtype}")  # what first use costs
    before = _reset_peak()
    export(
        f"{root}/ckpt",
        f"{root}/out",
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        overwrite=True,
    )
    return _resident("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_export_of_a_200_m_checkpoint_in_bounded_memory(pool: RankPool, tmp_path: Path) -> None:
    """Saved at W = 4; under one output file, the largest tensor and 64 MiB."""
    largest = 2048 * 2048 * 4
    try:
        pool.run(_save_large, 4, str(tmp_path))
        for dtype, shard in (("source", 100_000_000), ("bfloat16", 40_000_000)):
            fresh = RankPool()  # memory that an earlier export gave back would hide this one's
            rise = fresh.run(_checkpoint_memory, 1, str(tmp_path), dtype, shard)[0]
            fresh.close()
            assert largest < rise <= shard + largest + 64 * MIB, (dtype, shard, rise)
            files = list((tmp_path / "out").glob("*.safetensors"))
            assert len(files) >= math.ceil(48 * largest / shard / (1 if dtype == "source" else 2))
    finally:
        shutil.rmtree(tmp_path / "ckpt", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
