"""What a checkpoint keeps about the Hugging Face models in it, so that they can be exported.

Nothing of transformers or PEFT is imported: a model is known by what it has.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from torch import nn

from shardplug.checkpoint.state.tensor_names import clean_name

__all__ = ["describe_modules"]

_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out")
"""Names of modules that are embeddings in the language models that people fine-tune."""


def describe_modules(models: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Describe the Hugging Face models among and inside the given models, outermost ones only.

    Args:
        models: The models, sharded or not; none is changed.

    Returns:
        One entry for each, made of JSON values: `model` (its number), `prefix` of its names
        ("llama." inside a LightningModule, "" for the model itself), `class`, `config` (what
        `save_pretrained` writes, and `_name_or_path`), `generation_config` or None. With PEFT
        adapters also `peft`: for each adapter its `config`, and `names`: what PEFT calls each
        tensor of the adapter's file -> the name in the model (None where only PEFT could tell).
    """
    return [
        _describe(index, prefix, module)
        for index, model in enumerate(models)
        for prefix, module in _outermost(model)
    ]


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        if _is_hugging_face(module):
            yield prefix, module
            return
        for name, child in module.named_children():
            yield from walk(f"{prefix}{name}.", child)

    for prefix, module in walk("", model):
        yield clean_name(prefix), module


def _is_hugging_face(module: nn.Module) -> bool:
    """A model that can save itself; a LightningModule that keeps a config cannot."""
    if not callable(getattr(module, "save_pretrained", None)):
        return False
    return _has_adapters(module) or hasattr(getattr(module, "config", None), "to_json_string")


def _has_adapters(module: nn.Module) -> bool:
    return isinstance(getattr(module, "peft_config", None), Mapping)


def _describe(index: int, prefix: str, module: nn.Module) -> dict[str, Any]:
    base = module
    if _has_adapters(module) and callable(getattr(module, "get_base_model", None)):
        base = module.get_base_model()  # type: ignore[operator]  # just checked
    config = getattr(base, "config", None)
    generation = getattr(base, "generation_config", None)
    found: dict[str, Any] = {
        "model": index,
        "prefix": prefix,
        "class": type(base).__name__,
        "config": _json_of(config) if hasattr(config, "to_json_string") else None,
        "generation_config": _json_of(generation) if hasattr(generation, "to_dict") else None,
    }
    ignored = getattr(base, "_keys_to_ignore_on_save", None)
    if ignored:
        found["ignored"] = sorted(map(str, ignored))
    if _has_adapters(module):
        found["peft"] = {
            name: {
                "config": _adapter_config(module, base, adapter),
                "names": _adapter_names(module, base, name),
            }
            for name, adapter in module.peft_config.items()  # type: ignore[operator, union-attr]
        }
    return found


def adapter_tensors(model: nn.Module) -> set[str] | None:
    """Return the names of all tensors in a PEFT model's adapters; None if PEFT does not tell."""
    base = model.get_base_model()  # type: ignore[operator]
    found: set[str] = set()
    for adapter in model.peft_config:  # type: ignore[union-attr]
        names = _adapter_names(model, base, adapter)
        if names is None:
            return None
        found.update(names.values())
    return found


def _json_of(config: Any) -> dict[str, Any]:
    """Return what `save_pretrained` writes for a config, and where the model came from."""
    try:
        written: dict[str, Any] = json.loads(config.to_json_string())
    except TypeError:  # a value of the user's that is no JSON
        written = _plain(config.to_dict())
    origin = getattr(config, "_name_or_path", None)
    if isinstance(origin, str) and origin:
        written["_name_or_path"] = origin
    return written


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value).removeprefix("torch.")


# -- Adapters -------------------------------------------------------------------------------------


def _adapter_config(module: nn.Module, base: nn.Module, adapter: Any) -> dict[str, Any]:
    """Return what PEFT writes to adapter_config.json."""
    written: dict[str, Any] = _plain(adapter.to_dict())
    written["inference_mode"] = True
    if not written.get("base_model_name_or_path"):
        origin = getattr(base, "name_or_path", None)
        written["base_model_name_or_path"] = origin if isinstance(origin, str) and origin else None
    if not written.get("task_type") and base is not module:
        written["auto_mapping"] = {
            "base_model_class": type(base).__name__,
            "parent_library": type(base).__module__,
        }
    return written


def _adapter_names(module: nn.Module, base: nn.Module, adapter: str) -> dict[str, str] | None:
    """Ask PEFT which tensors an adapter's file holds, by handing it names in place of tensors."""
    select = getattr(sys.modules.get("peft"), "get_peft_model_state_dict", None)
    if select is None:
        return None
    names = {clean_name(name): clean_name(name) for name in module.state_dict(keep_vars=True)}
    config = module.peft_config[adapter]  # type: ignore[index]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen: dict[str, str] = select(
                module,
                state_dict=names,
                adapter_name=adapter,
                save_embedding_layers=_saves_embeddings(base, config),
            )
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None  # a kind of adapter whose file is computed from its tensors
    if not all(isinstance(name, str) for name in chosen.values()):
        return None
    front = "" if base is not module else "base_model.model."  # transformers' own add_adapter
    return {front + theirs: name for theirs, name in chosen.items()}


def _saves_embeddings(base: nn.Module, config: Any) -> bool:
    """PEFT's own rule, without asking the hub: embeddings that have adapters or were resized."""
    targets = getattr(config, "target_modules", None) or ()
    if getattr(config, "trainable_token_indices", None) is not None:
        return False
    if not isinstance(targets, str) and any(name in targets for name in _EMBEDDINGS):
        return True
    file = Path(str(getattr(config, "base_model_name_or_path", None) or "")) / "config.json"
    if not file.is_file():
        return False
    try:
        original = json.loads(file.read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError):
        return False
    now = getattr(getattr(base, "config", None), "vocab_size", None)
    return original is not None and now is not None and original != now
