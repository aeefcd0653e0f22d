"""From a directory or a hub id to a patched model, ready to compute.

Only safetensors weights are read and no code from a model repository ever runs: a model that asks for its own code is
refused before anything else happens.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from longreach_kernels import resolve_backend
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PretrainedConfig,
)

from longreach_patches import config_faults, quantized, rope, rope_tables, weight_sources, wrapper
from longreach_patches.batch_invariant import check_backend, check_modules, check_ranks
from longreach_patches.cache.scales import KVScales
from longreach_patches.config_faults import in_one_line
from longreach_patches.config_file import override, stretch
from longreach_patches.errors import ModelLoadError, UnsupportedModelError
from longreach_patches.families import family_of, head_shape, head_shapes, layer_masks, layer_sources
from longreach_patches.formats import check_other_tools, declared_quantization, described
from longreach_patches.layout import SINGLE, RankLayout, check_layout
from longreach_patches.mixers.sizes import check_states
from longreach_patches.patch import PatchedModel, patch
from longreach_patches.rope_tables import RopeTable
from longreach_patches.tensor_parallel import is_fully_cut

logger = logging.getLogger(__name__)

_ANSWERING = ("ForCausalLM", "LMHeadModel")
_WITH_OTHER_PARTS = "ForConditionalGeneration"
_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A patched model on its device.

    Attributes:
        patched: the handle of the patch; `patched.model` is the model, in eval mode.
        max_positions: the longest sequence, in tokens, that the model's positions are made for.
        load_seconds: wall-clock time from the first file read to the last weight in place.
        layout: which part of the model this is.
        whole_bytes: of the layers' matrices that every tensor-parallel rank has whole; 0 if there is one rank.
        weight_bytes: of all parameters, buffers and weights with a format, of this rank.
        quantization: the formats of quantised weights, for people; None for weights in 16 or 32 bits.
        kv_scales: scales of 8-bit keys and values that the checkpoint brings, of this rank's heads.
        rope_tables: rotary frequencies of which each position names one; empty where a model has one set of them.
    """

    patched: PatchedModel
    device: torch.device
    dtype: torch.dtype
    max_positions: int
    load_seconds: float
    layout: RankLayout = SINGLE
    whole_bytes: int = 0
    weight_bytes: int = 0
    quantization: str | None = None
    kv_scales: KVScales | None = None
    rope_tables: tuple[RopeTable, ...] = ()

    @property
    def config(self) -> PretrainedConfig:
        """The model's own config: of the whole model, whatever part of it this is."""
        return self.patched.model.config


def load_config(
    model: str, overrides: Mapping[str, Any] | None = None, quantization: str | None = None
) -> PretrainedConfig:
    """Read a model's config from a directory or hub id. With YaRN its `max_position_embeddings` is the length that YaRN
    gives. What it declares of quantised weights, or is asked for at load with `quantization` (`quantized.KINDS`), is
    what `quantized.scheme_of` finds.

    `overrides` replace values of config.json before anything is derived from it; objects are merged key by key.

    Raises:
        ModelLoadError: there is no readable config, the model wants to run its own code, or an override has an unknown
            name.
        UnsupportedModelError: the family is not supported.
    """
    with config_faults.named(model):
        return _config_of(model, _read_config(model), overrides or {}, quantization)


def _config_of(
    model: str, raw: dict[str, Any], overrides: Mapping[str, Any], quantization: str | None
) -> PretrainedConfig:
    check_other_tools(model, raw)
    raw = raw | {name: overrides[name] for name in _QUANTIZATION if name in overrides}
    overrides = {name: value for name, value in overrides.items() if name not in _QUANTIZATION}
    found = declared_quantization(model, raw)
    if found is not None and quantization is not None:
        raise UnsupportedModelError(
            f"--quantization {quantization} is for weights of 16 bits, and those of {model} are quantized: "
            f"{described(*found)}; leave it out"
        )
    _check_purpose(model, raw)
    own_code = raw.get("auto_map")
    raw = wrapper.text_part(raw)
    config_faults.check_values(model, raw)  # in what is overridden, too: a name that is wrong there is told as such
    # transformers derives values from those of the file, so these are changed first and given to it as a file.
    changed = stretch(override(raw, overrides))
    config_faults.check_values(model, changed)
    model_type = changed.get("model_type")
    if not isinstance(model_type, str):
        wanted = "it has no model_type" if model_type is None else f"its model_type is {model_type!r}, no text"
        raise ModelLoadError(f"{model}: no usable config.json ({wanted}); give a directory in Hugging Face format")
    if (changed.pop("auto_map", None) or own_code) is not None:
        _ignore_own_code(model, model_type)
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{model}: transformers {transformers.__version__} has no model type {model_type!r}; docs/models.md has "
            "those that are served, and a newer transformers may have more"
        )
    for name in _QUANTIZATION:
        changed.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="longreach-config-") as folder:
        Path(folder, "config.json").write_text(json.dumps(changed), encoding="utf-8")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.name_or_path = model
    quantized.declare(config, *(found or (None, None)), quantization=quantization)
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise ModelLoadError(
            f"{model}: no usable config.json (max_position_embeddings is {positions!r}, no number of tokens)"
        )
    layer_masks(config)
    layer_sources(config)
    _check_shapes(model, config)
    config_faults.check_factors(model, config, head_shape(config).head_dim)
    rope.longest_sequence(config)  # which checks what it is made of
    return config


def load_model(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    random_weights: bool = False,
    batch_invariant: bool = False,
    layout: RankLayout = SINGLE,
    overrides: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    gguf_file: str | None = None,
    quantization: str | None = None,
    rope_by_request: bool = False,
) -> LoadedModel:
    """Load a causal language model, put it on its device and patch it.

    Args:
        model: a directory with config.json and safetensors files, or a hub id.
        device: "cpu", "cuda", "cuda:1", or "auto" (the GPU if there is one).
        dtype: "float32", "bfloat16", "float16", or "auto" (float32 on a CPU; the checkpoint's half precision on a GPU).
        backend: see `longreach_kernels.resolve_backend`.
        random_weights: build the model from its config alone, for measurements of speed.
        batch_invariant: as in `patch`.
        layout: which part of the model is kept. Files of the wanted dtype are mapped and not read where they are not
            needed; those of another are on the host as a whole for a moment.
        overrides: as in `load_config`.
        max_length: the longest sequence that there will be, in tokens; by default the longest that the model is made
            for. Rotary frequencies that depend on the length (LongRoPE, dynamic NTK) are those of this one.
        gguf_file: a file whose weights are read and dequantized, in place of safetensors files; `model` is then a
            directory with the config.json that `gguf_file.config_of` has made of it.
        quantization: makes weights of 16 bits FP8 ones, one layer after another: see `quantized.KINDS`.
        rope_by_request: whether each position names its table of rotary frequencies: see `rope_tables`.

    Raises:
        ModelLoadError: a file is missing, broken, or does not match the config.
        UnsupportedModelError: the family or a feature of the config is not supported.
        ValueError: the device, dtype or backend does not exist or cannot be combined, the model cannot be split so, or
            what is asked for is not batch invariant, or the model's positions are not made for sequences so long.
    """
    start = time.perf_counter()
    config = load_config(model, overrides, quantization)
    target = resolve_device(device)
    resolved_dtype = resolve_dtype(dtype, target, config)
    # All that can be refused is, before anything large is read.
    rope.check_length(config, max_length)
    chosen = resolve_backend(backend, target, resolved_dtype)
    tables = rope_tables.tables_of(config, max_length) if rope_by_request else ()
    check_layout(config, layout)
    weight_sources.check_split(config, layout)
    if batch_invariant:
        check_backend(chosen)
        check_ranks(layout)
        check_modules(weight_sources.without_weights(config))
    if random_weights:
        weighted = weight_sources.drawn(config, target, resolved_dtype, layout)
    elif gguf_file is not None:
        weighted = weight_sources.from_gguf(Path(gguf_file), config, target, resolved_dtype, layout)
    else:
        wrapped = wrapper.is_wrapper(_read_config(model))
        weighted = weight_sources.from_files(model, config, target, resolved_dtype, layout, wrapped=wrapped)
    loaded = weighted.model
    longest = rope.longest_sequence(config)
    if tables:
        rope_tables.install(loaded, tables)
    else:
        rope.freeze(loaded, max_length or longest)
    weight_bytes = quantized.bytes_of(loaded)
    patched = patch(loaded.eval().requires_grad_(False), backend, batch_invariant=batch_invariant)
    scheme = quantized.scheme_of(config)
    if family_of(config).fused_over(layout.size) and (layout.tensor_size == 1 or is_fully_cut(loaded)):
        patched.fuse_layers(layout)
    else:
        patched.spread_layers(layout)
    seconds = time.perf_counter() - start
    return LoadedModel(
        patched,
        target,
        resolved_dtype,
        longest,
        seconds,
        layout,
        weighted.whole_bytes,
        weight_bytes,
        quantization=None if scheme is None else scheme.name,
        kv_scales=weighted.kv_scales,
        rope_tables=tables,
    )


def resolve_device(name: str) -> torch.device:
    """Turn "auto", "cpu" or "cuda[:i]" into a device that exists, or raise a ValueError that says what does."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu or cuda[:index], got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda[:index], got {name!r}")
    if device.type == "cuda":
        index, count = device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise ValueError(
                f"device {name!r} does not exist: this machine has {count} CUDA device(s); use --device cpu"
            )
        return torch.device("cuda", index)
    return device


def resolve_dtype(name: str, device: torch.device, config: PretrainedConfig) -> torch.dtype:
    """Turn "auto" or a dtype's name into a dtype; on a CPU "auto" is float32, which is exact and fastest there."""
    if name != "auto":
        if name not in _DTYPES:
            raise ValueError(f"dtype must be auto, {', '.join(_DTYPES)}, got {name!r}")
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None)
    return own if own in (torch.bfloat16, torch.float16) else torch.bfloat16


def _read_config(model: str) -> dict[str, Any]:
    directory = Path(model)
    if not directory.is_dir():
        if model.startswith((".", "/", "~")):
            raise ModelLoadError(f"{model}: no such directory")
        try:
            return PretrainedConfig.get_config_dict(model)[0]
        except Exception as error:  # of the hub's client, of HTTP, or of JSON
            raise ModelLoadError(f"{model}: no usable config.json ({in_one_line(error)})") from error
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file; a model directory holds config.json and *.safetensors") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON ({in_one_line(error)})") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return raw


def _ignore_own_code(model: str, model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        raise ModelLoadError(
            f"{model}: its config.json has an auto_map, and transformers has no model type {model_type!r} of its own; "
            "code from a model repository is never run"
        )
    logger.warning(
        "%s: the auto_map in config.json is ignored; transformers' own class for %s is used", model, model_type
    )


def _check_purpose(model: str, raw: Mapping[str, Any]) -> None:
    """A reward model or an embedding model has weights that fit, and answers nonsense."""
    named = raw.get("architectures")
    answering = (*_ANSWERING, _WITH_OTHER_PARTS) if wrapper.is_wrapper(raw) else _ANSWERING
    if isinstance(named, list) and named and not any(str(name).endswith(answering) for name in named):
        raise ModelLoadError(
            f"{model}: config.json says that it is a {named[0]}; only language models that answer "
            f"(...{_ANSWERING[0]}) are served, not reward, embedding or classification models"
        )


def _check_shapes(model: str, config: PretrainedConfig) -> None:
    """Build the model without memory: values that no layer can be made of are the config's fault, not the weights'."""
    for shape in head_shapes(config):
        if shape.heads % shape.kv_heads:
            raise ModelLoadError(
                f"{model}: no usable config.json ({shape.heads} num_attention_heads cannot share {shape.kv_heads} "
                "num_key_value_heads)"
            )
    check_states(model, config)
    try:
        weight_sources.without_weights(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{model}: {error}") from error
    except Exception as error:  # each model class fails in its own way
        raise ModelLoadError(
            f"{model}: no model can be built of config.json ({type(error).__name__}: {in_one_line(error)})"
        ) from error
