"""The plan: figures of the paper, bad input, large models, and a model that is left as it was."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug.cli.plan import add_arguments, run
from shardplug.core.precision import Precision
from shardplug.errors import ConfigError, ModelError
from shardplug.memory import PLAN_KINDS, as_dict, as_text, draw_plan, plan
from shardplug.plan.choices import rank
from shardplug.plan.sizes.layout import place
from shardplug.plan.trace.repeated_blocks import live_bytes, trace_model
from shardplug.plan.trace.trace import Event, Mark, TraceSettings, trace_step
from tests.support.models import Block, TinyLM, lm_loss

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
LLAMA_70B = {
    **LLAMA,
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def _config(fields: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    names = {"architectures", *fields}
    return transformers.LlamaConfig(**{name: fields[name] for name in names - {"model_type"}})


def _tiny_plan(**options: Any) -> Any:
    return plan(
        TinyLM(),
        **{
            "devices": 2,
            "device_memory_gib": 4,
            "batch": torch.empty(2, 9, dtype=torch.int64, device="meta"),
            "loss": lambda model, batch: lm_loss(model(batch), batch),
            **options,
        },
    )


def _with_parameters(count: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(count // 50_000, 50_000, bias=False))


def test_the_papers_figures_stand_beside_ours() -> None:
    """Rajbhandari et al., ZeRO (2020), figure 1: 7.5e9 parameters, 64 GPUs."""
    model = _with_parameters(7_500_000_000)
    batch = torch.empty(1, 150_000, device="meta")
    found = plan(model, devices=8, nodes=8, device_memory_gib=80, batch=batch, offload=False)
    assert found.layout.num_parameters == 7_500_000_000
    shown = [round(found.paper[stage] / 1e9, 1) for stage in (0, 1, 2, 3)]
    assert shown == [120.0, 31.4, 16.6, 1.9]
    assert "120 / 31.41 / 16.64 / 1.875 GB" in as_text(found)
    # Ours after the last backward: fp32 masters, gradients and two moments over 64 ranks.
    for choice in found.choices:
        held = choice.timeline.phases["after_backward"]
        states = sum(held[kind] for kind in ("master_shards", "gradients", "optimizer_state"))
        assert states / 1e9 == pytest.approx(7.5 * 16 / 64, rel=1e-3)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_blocks_traced_once_give_the_whole_trace(
    device: str, checkpointing: bool, wrapped: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(_config({**LLAMA, "num_hidden_layers": 8}))
    model.config.use_cache = False
    if wrapped:  # some ways of checkpointing make a tensor without elements around each block
        for block in model.model.layers:
            block.register_forward_hook(_makes_nothing)
    placed = place(model, "auto", Precision(None, None))
    ids = torch.empty(2, 16, dtype=torch.int64, device="meta")
    settings = TraceSettings(device, checkpointing, None, None)
    arguments = (placed, model, {"input_ids": ids, "labels": ids}, None, settings)
    short, full = trace_model(*arguments), trace_step(*arguments)
    assert (short.traced_blocks, full.traced_blocks) == (4, 8)
    assert short.flops == full.flops > 0
    assert _same_numbers(short.events) == _same_numbers(full.events)
    assert live_bytes(short.events) == live_bytes(full.events)


def _makes_nothing(*_: Any) -> None:
    torch.empty(0, device="meta")


def _same_numbers(events: tuple[Event, ...]) -> list[Event]:
    """Number storages in the order of their allocation."""
    numbers: dict[int, int] = {}
    rows = []
    for event in events:
        if event.mark in (Mark.ALLOCATE, Mark.FREE):
            event = event._replace(number=numbers.setdefault(event.number, len(numbers)))
        elif event.mark is Mark.GRADIENT:
            event = event._replace(size=numbers[event.size])
        rows.append(event)
    return rows


class Unlike(nn.Module):
    """Blocks that differ: each is wider inside than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8, 8 + n) for n in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (n, 8)."""
        for layer in self.layers:
            x = layer(x)
        return x


class Shrinking(nn.Module):
    """Equal blocks that see less and less."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8, 8) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (n, 8)."""
        for layer in self.layers:
            x = layer(x)[:-1]
        return x


@pytest.mark.parametrize("kind", [Unlike, Shrinking])
def test_blocks_that_are_not_alike_are_all_traced(kind: type[nn.Module]) -> None:
    model = kind()
    placed = place(model, "auto", Precision(None, None))
    batch, settings = torch.empty(16, 8), TraceSettings("cpu", False, None, None)
    found = trace_model(placed, model, batch, None, settings)
    assert found.traced_blocks == 7
    assert _same_numbers(found.events) == _same_numbers(
        trace_step(placed, model, batch, None, settings).events
    )


def test_the_model_is_left_as_it_was() -> None:
    model = TinyLM(tied=True).eval()
    model.embed.weight.requires_grad_(False)
    model.register_buffer("seen", torch.ones(3))
    before = {name: (id(p), p.requires_grad, p.grad) for name, p in model.named_parameters()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    forwards = [vars(m).get("forward") for m in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    batch = torch.empty(2, 9, dtype=torch.int64)
    plan(model, devices=2, device_memory_gib=4, batch=batch, device="cpu")
    assert torch.equal(torch.rand(4), expected)  # no random numbers were taken
    after = {name: (id(p), p.requires_grad, p.grad) for name, p in model.named_parameters()}
    assert after == before
    assert model.head.weight is model.embed.weight and not model.training
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert [vars(m).get("forward") for m in model.modules()] == forwards
    assert torch.equal(model.seen, torch.ones(3)) and not model.seen.is_meta


def _mixture(inner: int, dtype: torch.dtype) -> tuple[int, int]:
    """Trace a mixture of experts; return its operations, and the bytes it allocates."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
        dtype=dtype,
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM._from_config(config, dtype=dtype)
    placed = place(model, "auto", Precision(None, None), dtype)
    ids = torch.empty(1, 256, dtype=torch.int64, device="meta")
    settings = TraceSettings("cpu", False, None, None)
    trace = trace_model(placed, model, {"input_ids": ids, "labels": ids}, None, settings)
    return trace.flops, sum(event.size for event in trace.events if event.mark is Mark.ALLOCATE)


def test_experts_are_traced_in_every_dtype() -> None:
    """torch has the shapes of grouped products on meta for bf16 alone."""
    low, full = _mixture(64, torch.bfloat16), _mixture(64, torch.float32)
    assert low == _mixture(64, torch.float16) and low[0] == full[0] > 0
    assert 1.2 * low[1] < full[1] < 2 * low[1]  # the router is in fp32 in all of them
    # Three products with two experts per token and layer; the backward has two for each of them.
    more = 3 * 2 * (256 * 2) * 3 * 32 * 64 * 2
    assert _mixture(128, torch.float32)[0] - full[0] == more


class LooksAtValues(TinyLM):
    """Decides by its activations, which a trace does not have."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return logits * 2 if logits.sum() > 0 else logits


def test_a_model_that_cannot_be_traced_gets_a_formula_and_says_so() -> None:
    model = LooksAtValues()
    batch = torch.empty(2, 9, dtype=torch.int64)
    found = plan(model, devices=2, device_memory_gib=4, batch=batch, device="cpu")
    assert not found.traced and found.fits
    assert "could not be traced" in found.notes[0] and "factor of 2" in found.notes[0]
    points = found.choices[0].timeline.points
    assert max(point.held["activations"] for point in points) > 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_formula_is_within_its_bound(checkpointing: bool) -> None:
    """Llama's activations by formula, next to the traced ones."""
    from shardplug.plan.sizes.activation_formula import estimated_trace
    from shardplug.plan.trace.segments import cut

    transformers = pytest.importorskip("transformers")
    fields = {**LLAMA, "num_hidden_layers": 16, "hidden_size": 256, "intermediate_size": 688}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(_config(fields))
    placed = place(model, "auto", Precision(torch.bfloat16, torch.float32))
    ids = torch.empty(4, 256, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    settings = TraceSettings("cuda", checkpointing, torch.bfloat16, None)
    kept = []
    for trace in (
        trace_model(placed, model, batch, None, settings),
        estimated_trace(placed.layout, model, batch, settings),
    ):
        total = 0
        for segment in cut(trace, placed.layout).segments:
            if segment.mark is Mark.LOSS:
                break
            total += segment.end.get("activations", 0)
        kept.append(total)
    assert 0.5 < kept[1] / kept[0] < 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_memory_gib": 0}, "Expected device_memory_gib above 0, got 0"),
        ({"device_memory_gib": -1}, "above 0"),
        ({"devices": 0}, "Expected devices to be an integer above 0, got 0"),
        ({"devices": 10**6}, "at most as many ranks as parameters"),
        ({"devices": 2, "replicate_size": 3}, "that replicate_size=3 divides"),
        ({"global_batch": 7, "micro_batch": 2}, "cannot be split into micro-batches of 2"),
        ({"micro_batch": 0}, "Expected micro_batch to be an integer above 0"),
        ({"precision": "fp8"}, "Expected a precision out of"),
        ({"optimizer": "lion"}, "Expected an optimizer out of"),
        ({"batch": None}, "give `batch=`"),
        ({"reserve_gib": 5}, "Expected reserve_gib"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _tiny_plan(**options)


def test_a_loss_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="loss that depends on trainable parameters"):
        _tiny_plan(loss=lambda model, batch: torch.zeros(()))


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    found = _tiny_plan(device_memory_gib=0.0001, reserve_gib=0, offload=False)
    assert not found.fits and found.best is None
    room = int(0.0001 * 2**30)
    sizes = [choice.device for choice in found.choices]
    assert len(set(sizes)) > 3 and [choice.over for choice in found.choices] == [
        size - room for size in sizes
    ]
    assert any("it misses by" in line and "MiB" in line for line in found.advice)
    assert any("devices of this size would do" in line for line in found.advice)
    assert "Nothing fits" in as_text(found)


def test_the_fastest_that_fits_comes_first() -> None:
    roomy = _tiny_plan()
    assert roomy.best is roomy.choices[0] and roomy.best.reason == "the fastest that fits"
    assert not roomy.best.activation_checkpointing
    times = [choice.time.total for choice in roomy.choices if choice.fits]
    assert times == sorted(times) and len(set(times)) > 2
    least = min(choice.device for choice in roomy.choices if not choice.unavailable)
    tight = _tiny_plan(device_memory_gib=(least + 1) / 2**30, reserve_gib=0)
    assert tight.best is not None and tight.best.device == least
    assert {choice.name for choice in tight.choices} == {choice.name for choice in roomy.choices}
    assert as_dict(tight)["choices"][0]["peak_bytes"].keys() == set(PLAN_KINDS)


def test_what_a_loop_keeps_is_planned() -> None:
    """Accelerate's outputs in fp32, and Lightning's gradients during the first forward."""
    options = {
        "precision": "bf16-mixed",
        "stage": 2,
        "offload": False,
        "activation_checkpointing": False,
        "accumulate": 2,
        "keep_outputs": True,
        "loss": lambda model, batch: model(batch).sum(),
    }
    plain, accelerate, lightning = (
        _tiny_plan(loop=loop, **options).choices[0].timeline
        for loop in ("pytorch", "accelerate", "lightning")
    )
    logits = 2 * 9 * 257
    kept = [
        timeline.phases["after_forward"]["logits_and_loss"] for timeline in (lightning, accelerate)
    ]
    assert kept[1] - kept[0] == 2 * logits, "4 bytes for each instead of 2"
    assert accelerate.phases["after_forward"]["gradients"] == 0
    assert plain.phases["after_forward"]["gradients"] == 0
    stale = lightning.phases["after_forward"]["gradients"]
    shards = 4 * sum(-(-p.shape[0] // 2) * p[0].numel() for p in TinyLM().parameters() if p.dim())
    assert 0 <= stale - shards <= 8, "and the scalar's, which is whole"
    assert stale == lightning.phases["after_backward"]["gradients"]


def test_bytes_moved_are_the_stage_tables() -> None:
    """docs/concepts/zero.md: (N-1)/N times 2P, (1 + k)P and 3kP, but for padding."""
    found = _tiny_plan(
        accumulate=3, precision="32-true", activation_checkpointing=False, offload=False
    )
    parameters = 4 * sum(p.numel() for p in TinyLM().parameters() if p.dim())
    factors = {1: 2, 2: 4, 3: 9}
    for choice in found.choices:
        expected = factors[choice.stage] * parameters / 2
        assert choice.timeline.moved.total == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("loop", ["lightning", "accelerate", "pytorch"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_each_loop_and_precision_can_be_planned(loop: str, precision: str) -> None:
    found = plan(
        _config(LLAMA),
        devices=2,
        device_memory_gib=4,
        seq_length=16,
        precision=precision,
        loop=loop,  # type: ignore[arg-type]
        accumulate=2,
    )
    assert found.traced, found.notes
    assert found.fits
    assert "flash attention" in found.attention or precision == "32-true"


def test_a_large_model_is_planned_from_its_configuration_alone() -> None:
    """Llama-3.1-70B on 8 devices of 80 GiB: states alone are 16 bytes / 8 per parameter."""
    found = plan(_config(LLAMA_70B), devices=8, device_memory_gib=80, seq_length=4096)
    assert found.traced and found.layout.num_parameters == 70_553_706_496
    assert {c.name for c in found.choices if c.fits} == {
        "zero3_cpu offload_params=cpu checkpointing",
        "zero3_nvme offload_params=cpu checkpointing",
        "zero3_infinity checkpointing",
    }
    on_device = [choice for choice in found.choices if choice.offload_params == "none"]
    assert len(on_device) == 18 and not any(choice.fits for choice in on_device)
    assert (
        found.best is not None and found.best.name == "zero3_cpu offload_params=cpu checkpointing"
    )
    choice = next(c for c in found.choices if c.name == "zero3 checkpointing")
    rest = choice.timeline.phases["at_rest"]
    states = rest["master_shards"] + rest["optimizer_state"]
    assert states == pytest.approx(found.layout.num_parameters * 12 / 8, rel=1e-3)
    # Weights, gradients and two moments in fp32, and the weights in bf16.
    on_disk = next(c for c in found.choices if c.name == "zero3_infinity checkpointing").disk
    assert on_disk == pytest.approx(found.layout.num_parameters * (4 + 4 + 8 + 2), rel=1e-3)


def _command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(arguments))


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def test_the_command_prints_a_table(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = _command(config_file, "--devices", "2", "--device-memory", "8", "--seq-length", "16")
    text = capsys.readouterr().out
    assert code == 0
    assert "* zero" in text and "the fastest that fits" in text and "ZeRO paper" in text
    assert max(len(line) for line in text.splitlines()) < 320


_SMALL: dict[str, dict[str, Any]] = {  # default configurations, but for their sizes
    "T5Config": {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4},
    "CLIPConfig": {},
    "ViTConfig": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2},
    "WhisperConfig": {
        **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 24),
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    },
    "RobertaConfig": {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 2},
}


@pytest.mark.parametrize(
    ("kind", "planned", "positions"),
    [
        ("T5Config", "T5ForConditionalGeneration", None),
        ("CLIPConfig", "CLIPModel", 77),
        ("ViTConfig", "ViTForImageClassification", None),
        ("WhisperConfig", "WhisperForConditionalGeneration", 448),
        ("RobertaConfig", "RobertaForMaskedLM", 510),  # of 512 two are the padding's
    ],
)
def test_a_default_configuration_is_planned_whole(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    planned: str,
    positions: int | None,
) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(**_SMALL[kind])
    assert not config.architectures
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config.to_dict(), "model_type": config.model_type}))
    options = (str(path), "--devices", "2", "--device-memory", "64", "--stage", "3", "--json")
    options += ("--precision", "32-true", "--checkpointing", "off")
    found_at: dict[int | None, int] = {}
    for length in (None, 64):
        given = () if length is None else ("--seq-length", str(length))
        assert _command(*options, *given) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["model_class"] == planned and found["traced"], found["notes"]
        whole = getattr(transformers, planned)
        with torch.device("meta"):
            expected = sum(p.numel() for p in whole(config).parameters())
        assert found["parameters"] == expected
        found_at[length] = found["seq_length"]
        assert found["seq_length_assumed"] == (length is None and kind != "ViTConfig")
    if kind == "ViTConfig":
        assert found_at == {None: None, 64: None}
        return
    assert found_at == {None: positions or 4096, 64: 64}
    if positions is not None:
        assert _command(*options, "--seq-length", str(positions + 1)) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"at most {positions}, the positions" in said


def test_a_configuration_of_no_known_class_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    for fields, message in (
        ({"model_type": "wav2vec2"}, "got Wav2Vec2ForCTC: give `batch=`"),
        ({"model_type": "dac", "architectures": ["Own"]}, "got DacConfig with Own"),
        ({"model_type": "vit", "hidden_act": "none such"}, "ViTForImageClassification can be"),
    ):
        path.write_text(json.dumps(fields))
        assert _command(str(path), "--devices", "2", "--device-memory", "8") == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and message in said


def test_the_length_is_the_models_own_where_none_is_given(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--devices", "2", "--device-memory", "80", "--stage", "3", "--checkpointing", "off")
    assert _command(config_file, *common) == 0
    text = capsys.readouterr().out
    assert "micro-batch 1 x 4096 tokens (seq_length was not given)" in text  # it has 8192
    assert "(LlamaForCausalLM): " in text


def test_of_choices_as_fast_the_plainest_comes_first() -> None:
    """A ViT-B on four devices that it fits with ease."""
    transformers = pytest.importorskip("transformers")
    found = plan(transformers.ViTConfig(), devices=4, device_memory_gib=24)
    best = found.best
    assert found.traced and best is not None and best.name == "zero1"
    slower = {c.name: c.time.compute for c in found.choices}
    assert slower["zero1 checkpointing"] > 1.2 * slower["zero1"], "recomputation takes time"
    # Where it hides behind the link, both take as long.
    timed = [replace(c, time=replace(c.time, compute=0.0)) for c in reversed(found.choices)]
    names = [choice.name for choice in rank(timed)]
    assert names[:4] == ["zero1", "zero2", "zero1 checkpointing", "zero2 checkpointing"]


def test_the_command_prints_json_and_a_picture(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "new" / "plan.png"
    code = _command(
        str(Path(config_file).parent),
        *("--devices", "2", "--device-memory", "8", "--seq-length", "16", "--json"),
        *("--picture", str(picture)),
    )
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["fits"] and found["choices"][0]["fits"]
    assert picture.stat().st_size > 20_000


def test_the_command_prints_the_configuration(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = pytest.importorskip("yaml")
    common = (config_file, "--devices", "4", "--device-memory", "8", "--seq-length", "16")
    assert _command(*common, "--auto", "--accumulate", "2", "--checkpointing", "on") == 0
    takes, lightning, accelerate = re.split("# Lightning|# Accelerate", capsys.readouterr().out)
    assert re.match(r"# zero\d checkpointing: \d\.\d\d GiB of each device\n", takes)
    assert "activation_checkpointing=True" in lightning
    assert "accumulate_grad_batches=2" in lightning and "devices=4" in lightning
    content = yaml.safe_load(accelerate.partition("\n")[2])
    assert content["num_processes"] == 4 and content["mixed_precision"] == "bf16"
    assert content["fsdp_config"]["fsdp_sharding_strategy"].startswith("shardplug:zero")


_PASTED = """
{line}
assert trainer.strategy.config.activation_checkpointing
assert shardplug.fabric.ZeroStrategy and shardplug.hf.from_pretrained
assert not hasattr(shardplug, "lightening")
"""


def test_the_printed_lightning_lines_can_be_pasted(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of their own, where nothing else has imported a part of the package."""
    pytest.importorskip("lightning")
    common = (config_file, "--devices", "1", "--device-memory", "8", "--seq-length", "16")
    assert _command(*common, "--auto", "--cpu", "--checkpointing", "on") == 0
    printed = capsys.readouterr().out.partition("# Accelerate")[0]
    line = printed.replace("devices=1", "devices=1, logger=False")
    subprocess.run([sys.executable, "-c", _PASTED.format(line=line)], check=True, timeout=100)


def test_what_is_missing_outside_the_device_is_named(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (config_file, "--devices", "2", "--device-memory", "8", "--seq-length", "16")
    assert _command(*common, "--host-memory", "0.00001", "--nvme", "0.00001", "--stage", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    reasons = {line.split("  ")[1]: line for line in lines if "too much" in line}
    assert reasons["zero3_cpu"].endswith("MiB of a node's memory too much")
    assert reasons["zero3_infinity"].endswith("of a node's memory too much")
    tight = ("--device-memory", "1.0001", "--host-memory", "0.00001", "--nvme", "0.00001")
    assert _command(config_file, "--devices", "2", "--seq-length", "16", *tight) == 1
    assert re.search(r"it misses by [\d.]+ MiB", capsys.readouterr().out)


def test_auto_says_what_its_choice_takes_elsewhere(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (config_file, "--devices", "2", "--seq-length", "16", "--stage", "3")
    assert _command(*common, "--device-memory", "8", "--json") == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    least = min(c["device_bytes"] for c in choices if c["offload_optimizer"] == "none")
    assert _command(*common, "--device-memory", str(1 + (least - 1) / 2**30), "--auto") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("# zero3_") and "GiB of a node's memory" in first
    assert "of which --host-memory says nothing" in first


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--device-memory", "0"), 2, "above 0"),
        (("--device-memory", "8", "--devices", "1000000"), 2, "as many ranks as parameters"),
        (("--device-memory", "8", "--global-batch", "3"), 2, "cannot be split"),
        (("--device-memory", "1.00001"), 1, ""),
    ],
)
def test_exit_codes(
    config_file: str,
    arguments: tuple[str, ...],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = _command(config_file, "--devices", "2", "--seq-length", "16", *arguments)
    printed = capsys.readouterr()
    assert found == code
    assert message in printed.err
    assert ("Nothing fits" in printed.out) == (code == 1)


def test_a_model_that_cannot_be_reached_says_how_to_give_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    code = _command("nobody/nothing", "--devices", "2", "--device-memory", "8")
    assert code == 2
    assert "give the path of that file" in capsys.readouterr().err


def test_drawing_shows_the_peak(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = _tiny_plan(accumulate=2)
    draw_plan(found, tmp_path / "plan.png", found.choices[-1])
    assert (tmp_path / "plan.png").stat().st_size > 20_000


def test_planning_a_module_needs_no_transformers() -> None:
    code = (
        "import sys, torch\n"
        "from torch import nn\n"
        "import shardplug.memory as memory\n"
        "assert 'transformers' not in sys.modules\n"
        "found = memory.plan(nn.Sequential(nn.Linear(8, 8)), devices=2, device_memory_gib=4,\n"
        "                    batch=torch.empty(2, 8))\n"
        "assert found.fits and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
