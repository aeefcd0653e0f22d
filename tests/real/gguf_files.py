"""A GGUF file's tensors under the names that transformers has for them, and its metadata.

The weights are dequantized, so both sides of a comparison have the same ones; they differ a little from the published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

# llama.cpp's names of a block's parts, and transformers'.
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_OF_LLAMA = {"ffn_norm": "post_attention_layernorm"}
# Gemma's layers also have a norm behind attention and one behind the MLP.
_NORMS_OF_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFFile:
    """One file of an architecture that is `llama` or `gemma3`."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self.architecture: str = self.text("general.architecture")
        if self.architecture not in ("llama", "gemma3"):
            raise ValueError(f"{path}: no names are known for the architecture {self.architecture}")

    def text(self, key: str) -> Any:
        """A value of the metadata, by its whole name."""
        return self._reader.fields[key].contents()

    def number(self, key: str) -> Any:
        """A value of the metadata about the architecture, such as `block_count`, as Python's int or float."""
        value = self.text(f"{self.architecture}.{key}")
        return value.item() if isinstance(value, np.generic) else value

    def weights(self) -> dict[str, np.ndarray]:
        """All tensors, as fp32."""
        found = {}
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            outer, *inner = tensor.name.split(".")
            if outer == "rope_freqs":
                continue
            if outer == "blk":
                layer, part, kind = inner
                found[f"model.layers.{layer}.{self._part(part)}.{kind}"] = self._as_published(part, values)
            else:
                found[f"{_OUTER[outer]}.{inner[0]}"] = self._as_published(outer, values)
        return found

    def _part(self, part: str) -> str:
        return (_PARTS | (_NORMS_OF_LLAMA if self.architecture == "llama" else _NORMS_OF_GEMMA))[part]

    def _as_published(self, part: str, values: np.ndarray) -> np.ndarray:
        """Undo what llama.cpp's conversion changes in the values themselves."""
        if self.architecture == "gemma3" and part.endswith("norm"):
            return values - 1  # transformers' norm adds it
        if self.architecture == "llama" and part in ("attn_q", "attn_k"):
            # Channels that rotate together lie side by side there, and half a head apart in transformers.
            heads = self.number("attention.head_count" if part == "attn_q" else "attention.head_count_kv")
            pairs = values.reshape(heads, -1, 2, values.shape[1])
            return np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(values.shape)
        return values
