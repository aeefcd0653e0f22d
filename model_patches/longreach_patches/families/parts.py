"""What a fused layer is put together from: a value for each family, with the names that its modules have.

What differs by checkpoint is read from the modules: biases, head dims, scales, the values of multipliers, the
activation, how many experts a token has. The channels that are turned are as many as the model gives cosines for.
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
        single: each cosine and sine is there once; the table is (T, R / 2).
    """

    pairs: bool = False
    doubled: bool = False
    single: bool = False

    def channels(self, width: int) -> int:
        """How many channels of a head are turned, with a table of this width."""
        return 2 * width if self.single else width


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts (Shazeer et al. 2017) in place of an MLP: the names in its module, and how tokens choose.

    An attribute of the router is given by its name, anything else by its path from the mixture's module.

    Attributes:
        router: the module with the weight (E, C), and maybe the bias (E,), of the logits.
        experts: the module with the weights of all experts.
        scores: what a token's logits become: a softmax of all, a sigmoid of each, or a softmax of the chosen ones.
        correction: the path of what is added to the scores for the choice alone.
        groups: attributes of the number of groups of experts, and of the groups that a token chooses from.
        renormalise: whether the weights of a token's experts are divided by their sum; or the attribute that says it.
        epsilon: what is added to that sum.
        least_sum: the attribute that has the least that the sum counts as.
        factor: the attribute that has the factor of the weights.
        shared: the gated MLP that all tokens go through, if the mixture has one.
        shared_gate: the projection (1, C) whose sigmoid is the factor of what that gives.
        clamped: attributes of the experts' module that have alpha and the limit of a clamped SwiGLU; None where the
            module has an activation.
        transposed: whether weights of experts lie as (E, inputs, outputs), with gates and what they gate in turn.
    """

    router: str = "gate"
    experts: str = "experts"
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    correction: str | None = None
    groups: tuple[str, str] | None = None
    renormalise: bool | str = True
    epsilon: float = 0.0
    least_sum: str | None = None
    factor: str | None = None
    shared: str | None = None
    shared_gate: str | None = None
    clamped: tuple[str, str] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class DeltaParts:
    """A gated delta rule (Yang et al. 2024) behind a short convolution, in place of attention: the names in its module.

    The recurrence's queries, keys and values are what the convolution makes of projections of the layer's input. Two
    more projections are a number each for a value head: its decay, and how much of a key's old value is replaced.

    Attributes:
        module: the name that a layer has for it.
        qkv: the projections to queries, keys and values, in this order, or one that has all of them.
        gate, beta, decay: those to the gates of the result, to what is replaced, and to the decay.
        by_key_head: whether `qkv` has the gates too, and `beta` the decays; then what belongs to a key head lies
            together in each of the two: query, key, values and gates, and the numbers of its value heads.
        doubled: the attribute that says whether what is replaced goes up to 2, not 1.
        convolution, norm, out: the module of the convolution, of the result's norm, and the last projection.
    """

    module: str = "linear_attn"
    qkv: tuple[str, ...] = ("in_proj_qkv",)
    gate: str = "in_proj_z"
    beta: str = "in_proj_b"
    decay: str = "in_proj_a"
    by_key_head: bool = False
    doubled: str | None = None
    convolution: str = "conv1d"
    norm: str = "norm"
    out: str = "out_proj"


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
        sinks: the attention module's parameter that has a learned logit for each head.
        clip: the config's field that has the bound of queries, keys and values, before they are turned.
        mlp: the name of the MLP.
        mixture: how it is made in layers where it is not a gated one.
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
    sinks: str | None = None
    clip: str | None = None
    mlp: str = "mlp"
    mixture: Mixture | None = None

    @property
    def whole(self) -> str | None:
        """What keeps several ranks from computing a layer together; None if nothing does."""
        if self.qk_norm == "whole":
            return "norms over all heads"
        if len(self.qkv) == 1 or len(self.gate_up) == 1:
            return "projections that are joined on the disk"
        return None


LLAMA = LayerParts()
QWEN3 = replace(LLAMA, qk_norm="head")
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

# Mixtures of experts, in some layers or in all.
_SOFTMAX = Mixture(renormalise="norm_topk_prob")
_CORRECTED = Mixture(scores="sigmoid", correction="e_score_correction_bias")
_GROUPED = replace(
    _CORRECTED,
    correction="gate.e_score_correction_bias",
    groups=("num_group", "topk_group"),
    renormalise="norm_topk_prob",
    epsilon=1e-20,
    factor="routed_scaling_factor",
    shared="shared_experts",
)
MIXTRAL = replace(LLAMA, mixture=Mixture())
QWEN2_MOE = replace(LLAMA, mixture=replace(_SOFTMAX, shared="shared_expert", shared_gate="shared_expert_gate"))
QWEN3_MOE = replace(QWEN3, mixture=_SOFTMAX)
OLMOE = replace(LLAMA, qk_norm="whole", clip="clip_qkv", mixture=_SOFTMAX)
FLEX_OLMO = replace(OLMO2, mixture=_SOFTMAX)
MINIMAX_M2 = replace(LLAMA, qk_norm="whole", mixture=_CORRECTED)
HY_V3 = replace(
    QWEN3, mixture=replace(_CORRECTED, epsilon=1e-20, factor="router_scaling_factor", shared="shared_experts")
)
SOLAR_OPEN = replace(LLAMA, mixture=_GROUPED)
# GLM 4.5 Air has no norms of heads; GLM 4.5 has them.
GLM4_MOE = replace(QWEN3, mixture=_GROUPED)
ERNIE4_5_MOE = replace(
    HELIUM,
    mixture=Mixture(
        correction="gate.moe_statics.e_score_correction_bias", least_sum="norm_min", shared="shared_experts"
    ),
)
GRANITEMOE = replace(
    GRANITE, mlp="block_sparse_moe", mixture=Mixture(router="router", scores="softmax_of_chosen", renormalise=False)
)
GPT_OSS = replace(
    LLAMA,
    rotary=Rotary(single=True),
    sinks="sinks",
    mixture=Mixture(
        router="router", scores="softmax_of_chosen", renormalise=False, clamped=("alpha", "limit"), transposed=True
    ),
)

# Layers with a recurrent state.
QWEN3_5_DELTA = DeltaParts()
QWEN3_NEXT_DELTA = DeltaParts(qkv=("in_proj_qkvz",), beta="in_proj_ba", by_key_head=True)
OLMO_DELTA = DeltaParts(
    qkv=("q_proj", "k_proj", "v_proj"),
    gate="g_proj",
    beta="b_proj",
    decay="a_proj",
    doubled="allow_neg_eigval",
    norm="o_norm",
    out="o_proj",
)
