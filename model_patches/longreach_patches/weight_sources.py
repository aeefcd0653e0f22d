"""A model with its weights on its device: from safetensors files, quantised or not, from a GGUF file, or at random.

Whatever the source, a rank keeps its part alone, and no second copy of the model is made on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from longreach_patches import quantized, wrapper
from longreach_patches.cache.scales import KVScales
from longreach_patches.checkpoint import check_files
from longreach_patches.config_faults import in_one_line
from longreach_patches.errors import ModelLoadError
from longreach_patches.fused.shares import check_shares
from longreach_patches.layout import RankLayout
from longreach_patches.quantized.place import Placed
from longreach_patches.tensor_parallel import layer_cuts, split_head, split_weights, whole_bytes

_FAULTS = ("missing_keys", "mismatched_keys", "error_msgs")
_STD = 0.02  # of random weights, where a config does not say


class Weighted(NamedTuple):
    """A model, or its rank's part, on its device.

    Attributes:
        whole_bytes: of the layers' matrices that every tensor-parallel rank has whole.
        kv_scales: that the checkpoint brings, of this rank's heads.
    """

    model: PreTrainedModel
    whole_bytes: int
    kv_scales: KVScales | None = None


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device, with quantised modules where it declares them."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    quantized.place_declared(model)
    return model


def check_split(config: PretrainedConfig, layout: RankLayout) -> None:
    """See whether a model's quantised weights can be split, before anything is read.

    Raises:
        ValueError: a block of scales would be cut; the message names the module and the fix.
    """
    if layout.size > 1 and quantized.scheme_of(config) is not None:
        model = without_weights(config)
        split_weights(model, layout)
        check_shares(model, layout)


def drawn(config: PretrainedConfig, device: torch.device, dtype: torch.dtype, layout: RankLayout) -> Weighted:
    """A model with random weights. Every weight is drawn whole and cut at once: the parts of all ranks are those of one
    model, and a model fits that is larger than the device."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    placed: dict[nn.Module, Placed] = {one.module: one for one in quantized.place_declared(model).values()}
    whole = whole_bytes(model, layout)
    cuts = layer_cuts(model, layout)
    # From the inside out: some families draw a part's weights where they draw the module around it.
    for module in reversed([*model.modules()]):
        module.to_empty(device=device, recurse=False)
        # Some draw nothing for an activation's few numbers, which are then what the memory held.
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dim() < 2 and tensor.is_floating_point():
                nn.init.normal_(tensor, std=_STD)
        inner = module if isinstance(module, PreTrainedModel) else model  # an inner model may know its own sizes alone
        if module in placed:
            placed[module].draw(getattr(config, "initializer_range", None) or _STD, device, dtype)
        else:
            inner._init_weights(module)
        if module in cuts:
            cuts[module]()
    model.tie_weights()
    split_head(model, layout)
    return Weighted(model, whole)


def from_gguf(
    file: Path, config: PretrainedConfig, device: torch.device, dtype: torch.dtype, layout: RankLayout
) -> Weighted:
    """A model with the weights of a GGUF file, dequantised, and then quantised where the config asks for it.

    Raises:
        ModelLoadError, UnsupportedModelError: the file cannot be read, or not as a whole.
    """
    from longreach_patches import gguf_file as gguf  # transformers' reader takes its time to import

    model, report = gguf.load(file, config, dtype)
    _check_report(file, report, report.get("unexpected_keys") or ())
    placed = quantized.place_declared(model)
    whole = whole_bytes(model, layout)
    cuts = layer_cuts(model, layout, device)
    for one in placed.values():
        one.quantize_own(device)
        if one.module in cuts:
            cuts.pop(one.module)()
    return Weighted(_finished(model, cuts, layout, device), whole)


def from_files(
    model: str,
    config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    layout: RankLayout,
    *,
    wrapped: bool,
) -> Weighted:
    """A model with the weights of safetensors files in a directory, or of a hub id. `wrapped` files have parts beside
    the text model.

    Files of the wanted dtype are mapped and not read where they are not needed; those of another are on the host as a
    whole for a moment. Quantised modules are read one after another.

    Raises:
        ModelLoadError: a file is missing, broken, or does not match the config.
    """
    if (scheme := quantized.scheme_of(config)) is None:
        read = _by_transformers(model, config, dtype, wrapped)
        whole = whole_bytes(read, layout)
        return Weighted(_finished(read, layer_cuts(read, layout, device), layout, device), whole)
    directory = Path(model)
    if not directory.is_dir():
        directory = Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))
    source = check_files(directory, scheme.types)
    try:
        reading = quantized.read(source, config, scheme, dtype, wrapped)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelLoadError(f"{model}: the weights could not be read ({in_one_line(error)})") from error
    _check_report(source, reading.report, _unexpected(reading.report, wrapped))
    if (directory / GENERATION_CONFIG_NAME).is_file():  # which transformers' loader reads with files alone
        reading.model.generation_config = GenerationConfig.from_pretrained(str(directory))
    whole = whole_bytes(reading.model, layout)
    cuts = layer_cuts(reading.model, layout, device)
    for module in reading.fill(device, cuts):
        cuts.pop(module, None)
    try:
        scales = KVScales.of_checkpoint(config, reading.kv, layout, device)
    except ValueError as error:
        raise ModelLoadError(f"{source}: {error}") from error
    return Weighted(_finished(reading.model, cuts, layout, device), whole, scales)


def _finished(
    model: PreTrainedModel, cuts: Mapping[nn.Module, Callable[[], None]], layout: RankLayout, device: torch.device
) -> PreTrainedModel:
    """Make the cuts that are left, and put all on the device."""
    for cut in cuts.values():
        cut()
    split_head(model, layout, device)
    return model.to(device)  # pyright: ignore[reportArgumentType]


def _by_transformers(model: str, config: PretrainedConfig, dtype: torch.dtype, wrapped: bool) -> PreTrainedModel:
    source: str | Path = check_files(Path(model)) if Path(model).is_dir() else model
    try:
        loaded, report = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            AutoModelForCausalLM.from_pretrained(
                model,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                key_mapping=wrapper.KEY_MAPPING if wrapped else None,
            ),
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelLoadError(f"{model}: the weights could not be read ({in_one_line(error)})") from error
    _check_report(source, report, _unexpected(report, wrapped))
    return loaded


def _unexpected(report: Mapping[str, Any], wrapped: bool) -> list[str]:
    """Tensors of another model than the config describes; tables of frequencies are always computed."""
    return [
        name
        for name in report.get("unexpected_keys") or ()
        if not name.endswith("rotary_emb.inv_freq") and (not wrapped or wrapper.is_of_text(name))
    ]


def _check_report(source: str | Path, report: Mapping[str, Any], unexpected: Collection[str]) -> None:
    # transformers fills what is missing with random numbers and only warns; a server must not answer from those.
    for fault, found in (*((name, report.get(name)) for name in _FAULTS), ("unexpected_keys", unexpected)):
        if found:
            some = ", ".join(str(name) for name in sorted(found, key=str)[:3])
            raise ModelLoadError(f"{source}: the weights do not match config.json ({fault.replace('_', ' ')}: {some})")
