"""A GGUF file as a model: its config and its weights, dequantized, through transformers' reader of GGUF.

That reader leaves out some of a file's metadata, and class defaults of transformers then take its place. Here these
values are filled in, and a file with metadata or tensors that nothing reads is refused. llama.cpp's conversion changes
values, such as the order of rotary channels; transformers' reader undoes that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from longreach_patches.config_faults import in_one_line
from longreach_patches.errors import ModelLoadError, UnsupportedModelError

# llama.cpp's names of the architectures whose files are known to be read exactly, and the reader's names for them.
READ = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "starcoder2": "starcoder2",
}
# Of metadata that the reader leaves out, what has a place in config.json, if the family's class has it.
_FILLED_IN = {
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# What is looked at below, or says nothing of the numbers.
_LOOKED_AT = (
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
)
_SAYS_NOTHING = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_TABLES = (_FREQUENCIES, _LONG, _SHORT)
# Layers of the largest models, whose queries are scaled by the width of a head before it was cut (as in llama.cpp).
_SCALED_OTHERWISE = {"gemma2": 46, "gemma3": 62}
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def config_of(path: Path) -> dict[str, Any]:
    """The contents of the config.json that a GGUF file would have. The package `gguf` has to be installed.

    Raises:
        ModelLoadError: it is no whole GGUF file, or a part of a split one.
        UnsupportedModelError: its architecture is not read, or some of its metadata would be left out.
    """
    if _PART.search(path.name):
        raise ModelLoadError(
            f"{path}: one part of a split GGUF file; join the parts with llama.cpp's tool: llama-gguf-split --merge"
        )
    try:
        metadata, tensors = read_gguf_metadata(str(path))
    except Exception as error:  # of struct, of numpy, or of the reader
        raise _not_whole(path, error) from error
    architecture = str(metadata["general.architecture"])
    if architecture not in READ:
        raise UnsupportedModelError(
            f"{path}: GGUF files of the architecture {architecture!r} are not read; those of "
            f"{', '.join(sorted(READ))} are"
        )
    try:
        config: dict[str, Any] = dict(PretrainedConfig.get_config_dict(str(path.parent), gguf_file=path.name)[0])
    except Exception as error:
        raise _not_whole(path, error) from error
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    for name in ("quantization_config", "_model_name_or_path", "_commit_hash"):
        config.pop(name, None)
    # Without the tokens that the file does not name, those of the class would count, which are another model's.
    config = dict.fromkeys(_TOKENS) | {name: value for name, value in config.items() if value is not None}
    handled = _fill_in(path, config, own)
    _add_scaling(path, config, own, tensors)
    read = {key for key, name in GGUF_CONFIG_MAPPING[READ[architecture]].items() if name is not None}
    left = sorted(
        key
        for key, value in own.items()
        if key not in read | handled and key not in _SAYS_NOTHING and value not in (0, [])
    )
    if left:
        raise UnsupportedModelError(f"{path}: its metadata has {', '.join(left[:3])}, which would not be computed")
    return config | {"dtype": "bfloat16"}


def load(path: Path, config: PretrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a GGUF file in `dtype`, on the host, and transformers' report on its keys.

    Tensors are dequantized one after another to fp32 and cast.

    Raises:
        ModelLoadError: a tensor cannot be read.
        UnsupportedModelError: a tensor would be left out.
    """
    from gguf import GGUFReader, dequantize

    with torch.device("meta"):
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    try:
        reader = GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        names = get_gguf_hf_weights_map(empty, processor)
        found: dict[str, torch.Tensor] = {}
        for tensor in reader.tensors:
            if tensor.name in _TABLES:
                continue
            if tensor.name not in names and tensor.name.removesuffix(".weight") not in names:
                raise UnsupportedModelError(f"{path}: it has the tensor {tensor.name}, which would not be computed")
            values = processor.process(
                weights=dequantize(tensor.data, tensor.tensor_type),
                name=tensor.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": found},
            )
            if values.name is not None:  # else the processor has put it where it belongs
                found[names[values.name]] = torch.from_numpy(values.weights.copy()).to(dtype)
        found = {name: values.to(dtype) for name, values in found.items()}
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise _not_whole(path, error) from error
    return cast(
        "tuple[PreTrainedModel, dict[str, Any]]",
        type(empty).from_pretrained(None, config=config, state_dict=found, dtype=dtype, output_loading_info=True),
    )


def _fill_in(path: Path, config: dict[str, Any], own: Mapping[str, Any]) -> set[str]:
    """Put what the reader leaves out into `config`; the keys of the metadata that have a place there."""
    if config["model_type"] == "mistral":  # the reader's word for a llama that is called so; it has no windows
        config["model_type"] = "llama"
    model_type = str(config["model_type"])
    defaults = CONFIG_MAPPING[model_type]()
    handled: set[str] = {*_LOOKED_AT}
    for key, name in _FILLED_IN.items():
        if hasattr(defaults, name) or name.startswith("rope_"):
            handled.add(key)
            if key in own:
                config[name] = own[key]
    if model_type == "gemma3_text" and "attention.sliding_window" not in own:  # models of this family differ in it
        raise UnsupportedModelError(f"{path}: its metadata has no attention.sliding_window")
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    if own.get("attention.value_length", head_dim) != head_dim or own.get("attention.key_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{path}: its keys and values have head dims that its family has no place for")
    turned = int(own.get("rope.dimension_count", head_dim))
    if turned != head_dim:
        if model_type != "phi3":
            raise UnsupportedModelError(f"{path}: {turned} of {head_dim} channels of a head are rotary")
        config["partial_rotary_factor"] = turned / head_dim
    if (layers := _SCALED_OTHERWISE.get(model_type.removesuffix("_text"))) is not None:
        large = config["num_hidden_layers"] == layers
        config["query_pre_attn_scalar"] = hidden // heads if large else head_dim
    return handled


def _add_scaling(path: Path, config: dict[str, Any], own: Mapping[str, Any], tensors: tuple[str, ...]) -> None:
    """Put the scaling of RoPE into `config`, from metadata or from tables of factors among the tensors."""
    kind = own.get("rope.scaling.type", "none")
    factor, original = own.get("rope.scaling.factor"), own.get("rope.scaling.original_context_length")
    scaling: dict[str, Any] | None = None
    if _FREQUENCIES in tensors:
        scaling = _llama3(path, config, _table(path, _FREQUENCIES))
    elif _LONG in tensors:
        scaling = {"rope_type": "longrope", "short_factor": _table(path, _SHORT), "long_factor": _table(path, _LONG)}
        if "rope.scaling.attn_factor" in own:
            scaling["attention_factor"] = own["rope.scaling.attn_factor"]
        config["original_max_position_embeddings"] = original
    elif kind == "linear" or (kind == "yarn" and own.get("rope.scaling.attn_factor", 1.0) == 1.0):
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn" and original is not None:
            scaling["original_max_position_embeddings"] = original
    elif kind != "none":
        raise UnsupportedModelError(f"{path}: its RoPE is scaled by {kind!r} with values that are not read")
    if scaling is not None:
        config["rope_scaling"] = scaling


def _llama3(path: Path, config: Mapping[str, Any], divisors: list[float]) -> dict[str, Any]:
    """The llama3 scaling that a table of divisors was made of.

    Raises:
        UnsupportedModelError: it is none of the published ones.
    """
    factor, width = max(divisors), 2 * len(divisors)
    low, high, original = 1.0, 4.0, 8192
    expected = []
    for pair in range(len(divisors)):
        length = 2 * math.pi * float(config["rope_theta"]) ** (2 * pair / width)
        smooth = min(max((original / length - low) / (high - low), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(divisors, expected, strict=True)):
        raise UnsupportedModelError(f"{path}: {_FREQUENCIES} is a table of frequencies that is not known")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _table(path: Path, name: str) -> list[float]:
    from gguf import GGUFReader, dequantize

    for tensor in GGUFReader(path).tensors:
        if tensor.name == name:
            return [float(value) for value in dequantize(tensor.data, tensor.tensor_type).ravel()]
    raise ModelLoadError(f"{path}: the tensor {name} is missing")


def _not_whole(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"{path}: not a whole GGUF file, or of a kind that transformers does not read ({in_one_line(error)})"
    )
