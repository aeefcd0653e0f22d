"""What a fused layer is put together from: a value for each family, with the names that its modules have.

What differs by checkpoint is read from the modules: biases, head dims, scales, the values of multipliers, the
activation. The channels that are turned are as many as the model gives cosines for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# x / rms(x) * weight; the same with 1 + weight; (x - mean(x)) / deviation(x) * weight.
NormKind = Literal["rms", "rms_plus_one", "layer"]


@dataclass(frozen=True)
class Rotary:
    """Which channels of a head are turned together, and how cosines and sines lie in their table (T, R).

    Attributes:
        pairs: channel 2i is turned with 2i + 1; otherwise i with i + R / 2.
        doubled: each cosine and sine is there twice side by side; otherwise the second half repeats the first.
    """

    pairs: bool = False
    doubled: bool = False


@dataclass(frozen=True)
class LayerParts:
    """How the layers of a family are made. The defaults are those of Llama.

    Attributes:
        norm: the kind of all norms of a layer.
        attention_norms: names of the norms of what goes into attention, and of what it adds to the residual stream;
            None where there is none.
        mlp_norms: likewise, of the MLP.
        parallel: attention and MLP read the same normalised stream, and `mlp_norms` has no first one.
        qk_norm: whether queries and keys are normalised before they are turned: each head, or all heads together.
        rotary: how they are turned.
        qkv: the projections to queries, keys and values, in this order; one name where the checkpoint has them joined.
        gate_up: those to gates and to what they gate, likewise.
        activation: the name of the MLP's activation.
        multiplier: the layer's attribute that has the factor of all that is added to the residual stream.
        softcap: the attention module's attribute that has the bound of its scores.
        experts: whether layers may have another MLP than a gated one; that is called as it is.
    """

    norm: NormKind = "rms"
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    parallel: bool = False
    qk_norm: Literal["head", "whole"] | None = None
    rotary: Rotary = Rotary()
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    multiplier: str | None = None
    softcap: str | None = None
    experts: bool = False

    @property
    def whole(self) -> str | None:
        """What keeps several ranks from computing a layer together; None if nothing does."""
        if self.qk_norm == "whole":
            return "norms over all heads"
        if len(self.qkv) == 1 or len(self.gate_up) == 1:
            return "projections that are joined on the disk"
        return "experts" if self.experts else None


LLAMA = LayerParts()
QWEN3 = replace(LLAMA, qk_norm="head")
# With experts in some layers, or in all.
MIXTRAL = replace(LLAMA, experts=True)
QWEN3_MOE = replace(QWEN3, experts=True)
GEMMA = replace(LLAMA, norm="rms_plus_one")
GEMMA2 = replace(
    GEMMA,
    attention_norms=("input_layernorm", "post_attention_layernorm"),
    mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    softcap="attn_logit_softcapping",
)
# Its modules have the attribute of the bound, too, and do not use it.
GEMMA3 = replace(GEMMA2, qk_norm="head", softcap=None)
VAULTGEMMA = replace(GEMMA2, attention_norms=("input_layernorm", None), mlp_norms=("pre_feedforward_layernorm", None))
GRANITE = replace(LLAMA, multiplier="residual_multiplier")
# Of its second norms some configs have none; an Identity stands for them.
HYPERCLOVAX = replace(
    GRANITE,
    attention_norms=("input_layernorm", "post_norm1"),
    mlp_norms=("post_attention_layernorm", "post_norm2"),
)
# The stream itself goes into attention and MLP; what they add to it is normalised.
EXAONE4 = replace(
    LLAMA,
    attention_norms=(None, "post_attention_layernorm"),
    mlp_norms=(None, "post_feedforward_layernorm"),
    qk_norm="head",
)
OLMO2 = replace(EXAONE4, qk_norm="whole")
HELIUM = replace(LLAMA, rotary=Rotary(pairs=True))
PHI3 = replace(LLAMA, qkv=("qkv_proj",), gate_up=("gate_up_proj",), activation="activation_fn")
GLM = replace(HELIUM, gate_up=("gate_up_proj",), activation="activation_fn")
GLM4 = replace(
    GLM,
    attention_norms=("input_layernorm", "post_self_attn_layernorm"),
    mlp_norms=("post_attention_layernorm", "post_mlp_layernorm"),
)
COHERE2 = replace(LLAMA, norm="layer", mlp_norms=(None, None), parallel=True, rotary=Rotary(pairs=True, doubled=True))
