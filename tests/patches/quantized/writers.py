"""Publishers' layouts of quantised weights, written from their documentation, number by number.

Nothing here knows the readers. Each writer takes a weight (N, K) and gives its tensors, by the end of their names, and
the weight that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

FP8 = torch.float8_e4m3fn
Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]


def fp8_blocks(weight: Tensor, scale_name: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> Written:
    """A scale for each 128 x 128."""
    outputs, inputs = weight.shape
    scales = torch.empty(-(-outputs // 128), -(-inputs // 128))
    values, meant = torch.empty_like(weight), torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scale = (weight[place].abs().max() / 448).to(dtype).float()
            scales[row, column] = scale
            values[place] = (weight[place] / scale).clamp(-448, 448).to(FP8).float()
            meant[place] = values[place] * scale
    return {"weight": values.to(FP8), scale_name: scales.to(dtype)}, meant


def fp8_channels(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(FP8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def fp8_tensor(weight: Tensor, names: tuple[str, str] = ("weight_scale", "input_scale")) -> Written:
    """One scale of weights, and one of activations."""
    scale = weight.abs().max() / 448
    values = (weight / scale).to(FP8)
    return {"weight": values, names[0]: scale, names[1]: torch.tensor(0.02)}, values.float() * scale


def fbgemm(weight: Tensor) -> Written:
    tensors, meant = fp8_channels(weight)
    return tensors | {"input_scale_ub": torch.tensor(1200.0)}, meant


def integers(weight: Tensor, group: int, symmetric: bool, order: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Numbers (N, K) of 0 to 15, zeros and scales (N, groups), and what they mean; `order` groups inputs."""
    w = weight.double().numpy()
    outputs, inputs = w.shape
    groups = np.arange(inputs) // group if order is None else order
    count = inputs // group
    numbers, meant = np.zeros(w.shape, np.int64), np.zeros(w.shape)
    zeros, scales = np.zeros((outputs, count), np.int64), np.zeros((outputs, count))
    for one in range(count):
        own = w[:, groups == one]
        low, high = np.minimum(own.min(1), 0), np.maximum(own.max(1), 0)
        wide = np.maximum(-low / 8, high / 7) if symmetric else (high - low) / 15
        scale: np.ndarray = np.asarray(wide).astype(np.float16).astype(np.float64)
        zero = np.full(outputs, 8) if symmetric else np.clip(np.round(-low / scale), 0, 15).astype(np.int64)
        own = np.clip(np.round(own / scale[:, None]) + zero[:, None], 0, 15).astype(np.int64)
        numbers[:, groups == one] = own
        meant[:, groups == one] = (own - zero[:, None]) * scale[:, None]
        zeros[:, one], scales[:, one] = zero, scale
    return numbers, zeros, scales, meant


def packed(numbers: np.ndarray, order: Iterable[int] = range(8)) -> Tensor:
    """Eight numbers of a row to an int32: that of place `order[i]` in the bits from 4 i on."""
    rows, columns = numbers.shape
    words = np.zeros((rows, -(-columns // 8)), np.uint32)
    for row in range(rows):
        for start in range(0, columns, 8):
            for i, place in enumerate(order):
                if start + place < columns:
                    words[row, start // 8] |= np.uint32(int(numbers[row, start + place]) << (4 * i))
    return torch.from_numpy(words.view(np.int32).copy())


def pack_quantized(weight: Tensor, group: int, symmetric: bool = True, ordered: bool = False) -> Written:
    order = shuffled(weight.shape[1], group) if ordered else None
    numbers, zeros, scales, meant = integers(weight, group, symmetric, order)
    tensors = {
        "weight_packed": packed(numbers),
        "weight_scale": torch.from_numpy(scales).half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros.T).T.contiguous()
    if order is not None:
        tensors["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
    return tensors, torch.from_numpy(meant).float()


def gptq(weight: Tensor, group: int, symmetric: bool = True, ordered: bool = False, less: int = 1) -> Written:
    """`less` is 1 in the first version, which stores zeros less one."""
    order = shuffled(weight.shape[1], group) if ordered else None
    numbers, zeros, scales, meant = integers(weight, group, symmetric, order)
    groups = np.arange(weight.shape[1]) // group if order is None else order
    return {
        "qweight": packed(numbers).T.contiguous(),
        "qzeros": packed((zeros.T - less) % 16),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }, torch.from_numpy(meant).float()


def awq(weight: Tensor, group: int) -> Written:
    numbers, zeros, scales, meant = integers(weight, group, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed(numbers.T, order),
        "qzeros": packed(zeros.T, order),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }, torch.from_numpy(meant).float()


def shuffled(inputs: int, group: int) -> np.ndarray:
    """A group for each input, each of `group`, in no order."""
    return np.random.default_rng(inputs).permutation(inputs) // group


def mxfp4(weight: Tensor) -> Written:
    """Bytes (N, K / 2) and exponents (N, K / 32)."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    w = weight.double().numpy()
    outputs, inputs = w.shape
    nibbles, meant = np.zeros(w.shape, np.int64), np.zeros(w.shape)
    exponents = np.zeros((outputs, inputs // 32), np.uint8)
    for group in range(inputs // 32):
        place = slice(32 * group, 32 * group + 32)
        exponent = np.ceil(np.log2(np.abs(w[:, place]).max(1) / 6 + 1e-30))
        scale = 2.0**exponent
        nearest = np.abs(w[:, place, None] / scale[:, None, None] - table).argmin(-1)
        nibbles[:, place] = nearest
        meant[:, place] = table[nearest] * scale[:, None]
        exponents[:, group] = exponent + 127
    low, high = nibbles[:, 0::2], nibbles[:, 1::2]
    return {
        "weight_packed": torch.from_numpy((low | high << 4).astype(np.uint8)),
        "weight_scale": torch.from_numpy(exponents),
    }, torch.from_numpy(meant).float()


def is_projection(name: str) -> bool:
    """Whether a tensor of a saved model is the weight of a projection in a layer."""
    return ".layers." in name and name.endswith((*(f"{p}_proj.weight" for p in PROJECTIONS), *EXPERTS, *MIXERS))


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
EXPERTS = (".w1.weight", ".w2.weight", ".w3.weight")
MIXERS = tuple(f".linear_attn.{name}.weight" for name in ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"))


def write(
    directory: Path,
    model: PreTrainedModel,
    writer: Writer,
    declared: dict[str, Any],
    chosen: Callable[[str], bool] = is_projection,
) -> PreTrainedModel:
    """Save a model with quantised weights; returns transformers' model of what they mean, in fp32."""
    meant_directory = directory / "meant"
    model.save_pretrained(meant_directory)
    tensors = load_file(meant_directory / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if not chosen(name):
            stored[name] = meant[name] = tensor
            continue
        written, meant[name] = writer(tensor)
        stored |= {f"{name.removesuffix('weight')}{end}": value.contiguous() for end, value in written.items()}
    save_file(meant, meant_directory / "model.safetensors", {"format": "pt"})
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((meant_directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    return AutoModelForCausalLM.from_pretrained(meant_directory, attn_implementation="eager", dtype=torch.float32)


def write_gpt_oss(directory: Path, model: PreTrainedModel) -> PreTrainedModel:
    """As `write`, with experts in MXFP4 as OpenAI publishes them."""
    meant_directory = directory / "meant"
    model.save_pretrained(meant_directory)
    stored, meant = {}, {}
    for name, tensor in load_file(meant_directory / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = tensor
            continue
        each = [mxfp4(expert.T.contiguous()) for expert in tensor]
        blocks = torch.stack([written["weight_packed"] for written, _ in each])
        stored[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
        stored[f"{name}_scales"] = torch.stack([written["weight_scale"] for written, _ in each])
        meant[name] = torch.stack([value.T for _, value in each]).contiguous()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    save_file(meant, meant_directory / "model.safetensors", {"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads((meant_directory / "config.json").read_text())
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    return AutoModelForCausalLM.from_pretrained(meant_directory, attn_implementation="eager", dtype=torch.float32)
