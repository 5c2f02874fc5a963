"""Which modules are gathered together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core.shard import refuse_unshardable
from shardplug.core.units import UnitPlan, plan_units
from shardplug.errors import ModelError
from tests.support.models import Block, TinyLM
from tests.support.pool import RankPool


def _names(model: nn.Module, modules: tuple[nn.Module, ...]) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in modules]


def _plan(model: nn.Module, units: object = "auto", **options: object) -> UnitPlan:
    return plan_units(model, units, **options)  # type: ignore[arg-type]


def test_repeated_blocks_are_units_and_the_rest_is_the_root() -> None:
    model = TinyLM()
    plan = _plan(model)
    assert _names(model, plan.modules) == ["blocks.0", "blocks.1", "blocks.2"]
    assert plan.blocks == plan.modules
    assert plan.replicated == (model.scale,) and not plan.moved_up


def test_units_by_class_name_hold_inner_ones_first() -> None:
    model = nn.Sequential(TinyLM(), nn.Linear(2, 2))
    plan = _plan(model, ("TinyLM", "Block"))
    names = ["0.blocks.0", "0.blocks.1", "0.blocks.2", "0"]
    assert _names(model, plan.modules) == names
    assert _names(model, _plan(model, ("LayerNorm",)).modules)[0] == "0.blocks.0.norm"
    assert _plan(model, ()).modules == ()
    with pytest.raises(ModelError, match=r"no 'Blok'.*Block, Embedding"):
        _plan(model, ("Blok",))
    with pytest.raises(ModelError, match="'ModuleList', a plain container"):
        _plan(model, ("ModuleList",))


def test_child_units_leave_the_root_its_own_parameters() -> None:
    model = TinyLM()
    plan = _plan(model, child_units=True)
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert _names(model, plan.modules) == names
    assert _names(model, plan.blocks) == ["blocks.0", "blocks.1", "blocks.2"]


def test_blocks_in_a_sequential_and_nested_containers() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Sequential(Block(4, 4), Block(4, 4), nn.Tanh()),
        nn.ModuleList([nn.ModuleList([Block(4, 4), Block(4, 4)])]),
    )
    assert _names(model, _plan(model).modules) == ["1.0", "1.1", "2.0.0", "2.0.1"]


def test_leaf_modules_are_never_split_off() -> None:
    """Their weight may be read by the parent."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert _plan(model).modules == ()
    attention = nn.ModuleList(nn.MultiheadAttention(4, 2) for _ in range(2))
    model = nn.Sequential(attention, nn.Linear(4, 4))
    assert _names(model, _plan(model).modules) == ["0.0", "0.1"]
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    assert _names(encoder, _plan(encoder).modules) == ["layers.0", "layers.1"]


def test_hugging_face_models_use_their_own_classes_and_untied_embeddings() -> None:
    transformers = pytest.importorskip("transformers")
    for tied in (False, True):
        config = transformers.LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        layers = ["model.layers.0", "model.layers.1"]
        plan = _plan(model)
        embedding = [] if tied else ["model.embed_tokens"]
        assert sorted(_names(model, plan.modules)) == sorted(embedding + layers)
        assert _names(model, plan.blocks) == layers


def test_tied_parameters_are_in_one_unit() -> None:
    tied = TinyLM(tied=True)
    assert _plan(tied, child_units=True).moved_up == frozenset()
    names = ["blocks.0", "blocks.1", "blocks.2", "norm"]  # embedding and head go to the root
    assert _names(tied, _plan(tied, child_units=True).modules) == names

    across = TinyLM()  # two blocks that share a weight are dissolved into the root
    across.blocks[2].up.weight = across.blocks[0].up.weight
    plan = _plan(across)
    assert _names(across, plan.modules) == _names(across, plan.blocks) == ["blocks.1"]

    with_root = TinyLM()  # a weight shared with the root moves up, the block stays
    with_root.final = nn.Linear(37, 18, bias=False)
    with_root.final.weight = with_root.blocks[1].down.weight
    plan = _plan(with_root)
    assert _names(with_root, plan.modules) == ["blocks.0", "blocks.1", "blocks.2"]
    assert plan.moved_up == {with_root.final.weight}

    same = TinyLM()  # one block object in two places is one unit
    same.blocks[2] = same.blocks[0]
    assert _names(same, _plan(same).modules) == ["blocks.0", "blocks.1"]


def test_parameters_that_cannot_be_split_are_replicated() -> None:
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(1.0))
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.one = nn.Parameter(torch.ones(1))
    assert _plan(model).replicated == (model.scalar, model.empty)


class _Adapter(nn.Module):
    """fp32 weights of its own around a bf16 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).bfloat16()
        self.a = nn.Parameter(torch.zeros(2, 4))


def test_a_unit_has_one_trainable_dtype() -> None:
    model = TinyLM()
    for block in model.blocks:
        block.bfloat16()
        block.norm.float()
    model.norm.bfloat16()
    names = ["blocks.0.norm", "blocks.0", "blocks.1.norm", "blocks.1", "blocks.2.norm", "blocks.2"]
    assert _names(model, _plan(model).modules) == [*names, "norm"]
    # fp32 masters for all of them, or frozen ones: nothing to split
    assert _names(model, _plan(model, master_dtype=torch.float32).modules) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    for block in model.blocks:
        block.norm.requires_grad_(False)
    model.norm.requires_grad_(False)
    assert len(_plan(model).modules) == 3


def _number_of_units() -> list[int]:
    found = []
    for dtype in (None, "bf16"):
        model = TinyLM()
        model.blocks[0].up.to(torch.bfloat16)
        ZeroEngine(ZeroConfig(stage=3, param_dtype=dtype)).shard(model)
        found.append(sum(isinstance(module, FSDPModule) for module in model.modules()))
    return found


def test_master_weights_need_no_unit_for_an_odd_dtype(pool: RankPool) -> None:
    ((without, with_masters),) = pool.run(_number_of_units, 1)
    assert with_masters == 4 < without


def test_an_odd_module_agrees_with_what_lies_below_it() -> None:
    block = nn.Sequential(nn.Linear(9, 9).bfloat16(), _Adapter())
    names = ["1"]  # its own weights are the odd ones in a bf16 unit
    plan = _plan(block)
    assert _names(block, plan.modules) == ["1.base", *names]
    whole = _Adapter()  # the root has a dtype of its own, so that the layer below is the odd one
    assert _names(whole, _plan(whole).modules) == ["base"]


def test_dtypes_that_cannot_be_parted_are_refused_by_name() -> None:
    model = nn.Module()
    model.low = nn.Parameter(torch.zeros(3).bfloat16())
    model.high = nn.Parameter(torch.zeros(3))
    outer = nn.Sequential(nn.Linear(3, 3), model)
    with pytest.raises(ModelError, match=r"of 1 \(Module\) mix torch.bfloat16, torch.float32"):
        _plan(outer)
    with pytest.raises(ModelError, match="the model itself"):
        _plan(model)
    listed = nn.Sequential(nn.Linear(3, 3), nn.ParameterList([model.low]))
    with pytest.raises(ModelError, match=r"of 1 \(ParameterList\)"):
        _plan(listed)
    assert _plan(outer, master_dtype=torch.float32).modules == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it is imported
def test_what_torch_compile_wraps_is_refused_by_what_it_is() -> None:
    model = TinyLM()
    with pytest.raises(ModelError, match=r"not compiled as a whole.*block\.compile\(\)"):
        refuse_unshardable(torch.compile(model))
    model.blocks[1] = torch.compile(model.blocks[1])
    with pytest.raises(ModelError, match=r"got blocks\.1\..*layer\.compile\(\)") as caught:
        refuse_unshardable(model)
    assert "as a whole" not in str(caught.value)
