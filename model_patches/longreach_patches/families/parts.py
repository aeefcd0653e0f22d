"""What a fused layer is put together from: a value for each family, with the names that its modules have.

What differs by checkpoint is read from the modules: biases, head dims, scales, the values of multipliers, the
activation, how many experts a token has. The channels that are turned are as many as the model gives cosines for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

# x / rms(x) * weight; the same with 1 + weight; (x - mean(x)) / deviation(x) * weight + bias; that with 1 + weight.
# Norms without a weight or a bias have 1 and 0 for them.
NormKind = Literal["rms", "rms_plus_one", "layer", "layer_plus_one"]


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
class OutputGate:
    """What attention's result is multiplied by before it is projected back: a number for each channel or each head.

    Attributes:
        projection: the attention module's projection of the layer's normalised input to it.
        activation: the function of what that gives.
    """

    projection: str
    activation: Literal["sigmoid", "softplus"]


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts (Shazeer et al. 2017) in place of an MLP: the names in its module, and how tokens choose.

    An attribute of the router is given by its name, anything else by its path from the mixture's module.

    Attributes:
        router: the module with the weight (E, C), and maybe the bias (E,), of the logits.
        logits: the router's linear module that has these, if it does not have them itself.
        experts: the module with the weights of all experts.
        scores: what a token's logits become, see `longreach_kernels.moe.Routing`.
        scores_by: the attribute that says "softmax", of the chosen ones, or "sigmoid", in place of `scores`.
        softcap: the attribute that has the bound of the logits, or 0.
        jitter: the attribute that has how near to the greatest a logit counts in a sparse mixer.
        correction: the path of what is added to the scores for the choice alone.
        groups: attributes of the number of groups of experts, and of the groups that a token chooses from.
        renormalise: whether the weights of a token's experts are divided by their sum; or the attribute that says it.
        epsilon: what is added to that sum.
        least_sum: the attribute that has the least that the sum counts as.
        factor: the attribute that has the factor of the weights.
        sum_factor: the path of the factor of what the experts give together.
        shared: the gated MLP that all tokens go through, if the mixture has one.
        beside: the same, where it is the layer's and not the mixture's.
        halved: the path of what is "average" where half of what experts and shared MLP give together is added.
        shared_gate: the projection (1, C) whose sigmoid is the factor of what that gives.
        clamped: attributes of the experts' module that have alpha and the limit of a clamped SwiGLU; None where the
            module has an activation.
        transposed: whether weights of experts lie as (E, inputs, outputs), with gates and what they gate in turn.
    """

    router: str = "gate"
    logits: str | None = None
    experts: str = "experts"
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sparse_mixer"] = "softmax"
    scores_by: str | None = None
    softcap: str | None = None
    jitter: str | None = None
    correction: str | None = None
    groups: tuple[str, str] | None = None
    renormalise: bool | str = True
    epsilon: float = 0.0
    least_sum: str | None = None
    factor: str | None = None
    sum_factor: str | None = None
    shared: str | None = None
    beside: str | None = None
    halved: str | None = None
    shared_gate: str | None = None
    clamped: tuple[str, str] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class DeltaParts:
    """A gated delta rule (Yang et al. 2024) behind a short convolution, in place of attention: the names in its module.

    The recurrence's queries, keys and values are what the convolution makes of projections of the layer's input. Two
    more projections are a number each for a value head: its decay, and how much of a key's old value is replaced.

    Attributes:
        kind: the name that `layer_types` has for such layers.
        module: the name that a layer has for it.
        qkv: the projections to queries, keys and values, in this order, or one that has all of them.
        gate, beta, decay: those to the gates of the result, to what is replaced, and to the decay.
        by_key_head: whether `qkv` has the gates too, and `beta` the decays; then what belongs to a key head lies
            together in each of the two: query, key, values and gates, and the numbers of its value heads.
        doubled: the attribute that says whether what is replaced goes up to 2, not 1.
        convolution, norm, out: the module of the convolution, of the result's norm, and the last projection.
    """

    kind: ClassVar[str] = "linear_attention"

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

    @property
    def wide(self) -> tuple[str, ...]:
        """The projections to queries, keys, values and gates."""
        return self.qkv if self.by_key_head else (*self.qkv, self.gate)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Those to a number or two of each value head."""
        return (self.beta,) if self.by_key_head else (self.beta, self.decay)


@dataclass(frozen=True)
class ConvolutionParts:
    """A short convolution between two gates, in place of attention (LFM2): the names in its module.

    Attributes:
        kind: the name that `layer_types` has for such layers.
        module: the name that a layer has for it.
        projection: to the gate before the convolution, the gate behind it, and its inputs, in this order.
        convolution, out: the module of the convolution, and the last projection.
        width: the config's field that has how many inputs of a channel the convolution sees.
    """

    kind: ClassVar[str] = "conv"

    module: str = "conv"
    projection: str = "in_proj"
    convolution: str = "conv"
    out: str = "out_proj"
    width: str = "conv_L_cache"


@dataclass(frozen=True)
class SsmParts:
    """The states of Mamba-2 (Dao and Gu 2024) behind a short convolution, in place of attention: the names in its
    module, and those of sizes in the config.

    Attributes:
        kind: the name that `layer_types` has for such layers.
        module: the name that a layer has for it.
        projection: to gates, to the convolution's inputs, which become x, B and C, and to sizes of steps, in order.
        convolution, norm, out: the module of the convolution, of the gated result's norm, and the last projection.
        heads, head_dim, groups, state_size, width: the config's fields that have how many heads a layer has, the
            channels of each, how many B and C there are, the channels of these, and how many inputs of a channel the
            convolution sees.
    """

    kind: ClassVar[str] = "linear_attention"

    module: str = "mamba"
    projection: str = "in_proj"
    convolution: str = "conv1d"
    norm: str = "norm"
    out: str = "out_proj"
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    width: str = "mamba_d_conv"


# How layers are made that keep a state in place of keys and values.
MixerParts = DeltaParts | ConvolutionParts | SsmParts


@dataclass(frozen=True)
class LayerParts:
    """How the layers of a family are made. The defaults are those of Llama.

    Attributes:
        norm: the kind of all norms of a layer. Where a checkpoint may have RMSNorms for LayerNorms, the modules say so.
        epsilon: of norms that do not say it.
        attention_norms: names of the norms of what goes into attention, and of what it adds to the residual stream;
            None where there is none.
        mlp_norms: likewise, of the MLP.
        parallel: attention and MLP read the same normalised stream, and `mlp_norms` has no first one.
        qk_norm: whether queries and keys are normalised: each head before it is turned or after, or all heads together.
        qk_norms: names of the norms of queries and of keys.
        rotary: how they are turned.
        query_growth: whether queries grow with their positions, as the config's `rope_parameters` say (Llama 4).
        qkv: the projections to queries, keys and values, in this order; one name where the checkpoint has them joined.
        output: the projection of attention back to the residual stream.
        output_gate: what attention's result is multiplied by before that.
        gated_queries: whether the projection to queries has such gates, too, each head's behind its query; what counts
            is their sigmoid.
        gate_up: those to gates and to what they gate, likewise; the one to inner channels where there are no gates.
        gated: whether there are.
        down: the projection of the MLP back.
        activation: the name of the MLP's activation.
        multiplier: the layer's attribute that has the factor of all that is added to the residual stream.
        softcap: the attention module's attribute that has the bound of its scores.
        sinks: the attention module's parameter that has a learned logit for each head.
        clip: the config's field that has the bound of queries, keys and values, before they are turned.
        mlp: the name of the MLP.
        mixture: how it is made in layers where it is not a gated one.
    """

    norm: NormKind = "rms"
    epsilon: float | None = None
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    parallel: bool = False
    qk_norm: Literal["head", "turned_head", "whole"] | None = None
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    rotary: Rotary = Rotary()
    query_growth: bool = False
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    output_gate: OutputGate | None = None
    gated_queries: bool = False
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True
    down: str = "down_proj"
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
        if len(self.qkv) == 1 or (self.gated and len(self.gate_up) == 1):
            return "projections that are joined on the disk"
        return None
