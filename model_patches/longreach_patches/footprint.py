"""What a model takes of a device's memory, told from its config alone: no weight is read and none is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from longreach_patches import quantized
from longreach_patches.cache.shape import PageShape
from longreach_patches.cache.states import StateShape
from longreach_patches.families import (
    DeltaParts,
    MixerParts,
    SsmParts,
    expert_inner,
    experts_per_token,
    family_of,
    head_shape,
    widest_inner,
)
from longreach_patches.fused.shares import check_shares
from longreach_patches.layout import SINGLE, RankLayout, check_layout
from longreach_patches.policy_step import SELECTION_BYTES
from longreach_patches.tensor_parallel import is_fully_cut, split_weights

_CHUNK = 64  # tokens, between which a long prompt's states are kept


@dataclass(frozen=True)
class Footprint:
    """Bytes of weights and of the largest step's activations.

    Attributes:
        weight_bytes: parameters (tied ones once) and buffers.
        pages: what a token and a page take in the KV cache, layers with windows apart from the others.
        token_bytes: activations of one token at the peak of a decoder layer.
        row_bytes: of one row of logits that a token is drawn from.
        scratch_bytes: of a quantised weight that a product dequantises.
        states: what a sequence takes in the layers that keep a state; None for a model whose layers all attend.
    """

    weight_bytes: int
    pages: PageShape
    token_bytes: int
    row_bytes: int
    scratch_bytes: int = 0
    states: StateShape | None = None

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        dtype: torch.dtype,
        page_size: int,
        kv_dtype: torch.dtype | None = None,
        layout: RankLayout = SINGLE,
        bounded: tuple[int, ...] = (),
        arch: int = 0,
    ) -> Footprint:
        """Build the model on the meta device, where tensors have shapes and no memory; pages are of `kv_dtype`, or of
        the model's `dtype`, and keep bounds of the keys of the `bounded` layers. All sizes are those of one rank.

        `arch` is the GPU's compute capability (90 for 9.0), by which FP8 weights are multiplied or dequantised. With 0,
        for a CPU and where it is not known, they count as dequantised.

        Raises:
            ValueError: the model cannot be split so; the message names the sizes that work.
        """
        check_layout(config, layout)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            quantized.place_declared(model)
            split_weights(model, layout)
            check_shares(model, layout)
        pages = PageShape.of(config, kv_dtype or dtype, page_size, layout, bounded, divided=True)
        # What is whole on every rank has activations of all channels and heads there.
        parts = layout.tensor_size if is_fully_cut(model) else 1
        hidden, inner, experts = config.hidden_size, widest_inner(config) // parts, _experts(config, dtype, parts)
        most_heads = max(head_shape(config).heads, *(getattr(config, "num_attention_heads_per_layer", None) or [0]))
        heads = most_heads // (parts * layout.context_size)
        queries = heads * max(of_layer.head_dim for of_layer in pages.layers)
        keys = max(of_layer.num_kv_heads * of_layer.head_dim for of_layer in pages.layers)
        # The most that is alive at once for a token, in numbers of the model's dtype. All through a layer: the residual
        # stream, and the cosines and sines of the positions. MLP: the norm with gate and up, or these with their
        # product. Experts: see `_experts`. Attention: the norm with queries, keys and values, or these with queries and
        # keys that are normalised and rotated, or (with context parallelism) as they are sent and received, or the
        # result before, between and after its way back; and an fp32 number or two a head. Of a long step each context
        # rank has its part of the stream; short steps, of which it has all, are no step's peak.
        ranks = layout.context_size
        hidden, inner, experts = -(-hidden // ranks), -(-inner // ranks), -(-experts // ranks)
        rotary = 2 * sum({of_layer.head_dim for of_layer in pages.layers})
        states = StateShape.of(config, dtype, layout)
        parts = family_of(config).parts
        # Where attention and MLP read the same normalised stream, that lives as long. Several streams are predicted.
        copies = 2 if parts is not None and parts.parallel else 1
        streams = _streams(config)
        layer = _inputs_of_layers(config) + hidden * (copies if streams == 1 else 2 * streams) + rotary
        mlp = max(hidden + 2 * inner, 3 * inner, experts)
        attention = (
            max(hidden + queries + 2 * keys, 2 * queries + 4 * keys, 3 * queries if ranks > 1 else 0) + 4 * heads
        )
        if parts is not None and parts.output_gate is not None:  # as it is projected, and what is made of it
            attention += 2 * queries
        attention = max(attention + _gates(config, queries), hidden + _mixer(states, family_of(config).mixer, ranks))
        around = _around_layers(config, dtype)
        # A row of logits: as the model gives them, as float32, sorted with int64 places, and the sort's own copy.
        # Where each rank has a part: that, those of all, and these joined.
        logits = 1 if layout.size == 1 else 3
        row = config.vocab_size * (logits * dtype.itemsize + 4 + 2 * (4 + 8))
        return cls(
            weight_bytes=quantized.bytes_of(model),
            pages=pages,
            token_bytes=max(layer + max(mlp, attention), around) * dtype.itemsize + 8,  # and its position, int64
            row_bytes=row,
            scratch_bytes=quantized.scratch_bytes(model, dtype, arch),
            states=states,
        )

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most activation memory of a step of `num_tokens` tokens, `num_rows` of which draw the next.

        Layers and logits follow one another: the larger of the two counts. Where keys are chosen by their bounds, that
        is done in a layer.
        """
        layer = num_tokens * self.token_bytes + self.selection_bytes + self.scratch_bytes
        return max(layer, num_rows * self.row_bytes)

    @property
    def selection_bytes(self) -> int:
        """The most that choosing keys by their bounds takes within a step."""
        return SELECTION_BYTES if self.pages.bounded else 0


def _experts(config: PretrainedConfig, dtype: torch.dtype, parts: int) -> int:
    """What a mixture of experts takes for a token at its peak, in numbers of the model's dtype: the norm, the inner
    channels and the result of each of its experts, and fp32 logits. A module of the model's own also has their sum, and
    quantised weights may take inner channels of 8 bits."""
    count, inner = experts_per_token(config), expert_inner(config) // parts
    if not count:
        return 0
    copies = 1 if family_of(config).fused else 2
    logits = _number_of_experts(config) * torch.float32.itemsize // dtype.itemsize
    in_8_bits = 0 if quantized.scheme_of(config) is None else -(-count * inner // dtype.itemsize)
    return copies * config.hidden_size + count * (inner + config.hidden_size) + in_8_bits + logits


def _gates(config: PretrainedConfig, queries: int) -> int:
    """What gates of attention's result take for a token beside it: as they are projected, and laid out anew. The Qwens
    with states have them; what other families project beside queries is less than their MLP."""
    return 3 * queries if isinstance(family_of(config).mixer, DeltaParts) else 0


def _mixer(states: StateShape | None, parts: MixerParts | None, ranks: int) -> int:
    """What a layer with a state takes for a token at its peak, in numbers of the model's dtype: the projections, the
    convolution's inputs and results, the gates and the result; and in fp32 decays and what chunks make of keys and
    values, among them the states between chunks of 64 tokens. Where a convolution is all that keeps a state: its gates
    and inputs in one projection, and what becomes of these. Of Mamba-2: the projection, what the convolution makes of
    its part, the result before and behind its norm, and in fp32 the factors of each head. Context ranks also have what
    they sent of their own tokens."""
    if states is None:
        return 0
    sent = states.channels if ranks > 1 else 0
    if not states.heads:
        return 5 * states.channels + sent
    wide = torch.float32.itemsize // states.dtype.itemsize
    values = states.heads * states.value_dim
    if isinstance(parts, SsmParts):
        return 2 * states.channels + sent + 3 * values + states.heads * (1 + 5 * wide)
    between = states.heads * states.key_dim * states.value_dim // _CHUNK
    of_chunks = states.heads * (2 * states.key_dim + 2 * states.value_dim + _CHUNK + 8) + between
    return 3 * states.channels + sent + 3 * values + wide * of_chunks


def _number_of_experts(config: PretrainedConfig) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = (getattr(config, name, None) for name in names)
    return next((count for count in found if isinstance(count, int)), 0)


def _inputs_of_layers(config: PretrainedConfig) -> int:
    """What each layer of Gemma 3n and 4 is given beside the stream, for a token and all layers together."""
    return config.num_hidden_layers * (getattr(config, "hidden_size_per_layer_input", None) or 0)


def _streams(config: PretrainedConfig) -> int:
    """How many residual streams there are; Gemma 3n has several, and predicts them before a layer."""
    return getattr(config, "altup_num_inputs", None) or 1


def _around_layers(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """The most that is alive at once for a token before or between layers, in numbers of the model's dtype.

    The layers' inputs are two tables that are added up, one of them normalised in fp32: before, and its result. Several
    streams are predicted and corrected, which takes five of each.
    """
    inputs, streams = _inputs_of_layers(config), _streams(config)
    wide = 2 * torch.float32.itemsize // dtype.itemsize
    between = inputs + 5 * streams * config.hidden_size if streams > 1 else 0
    return max((2 + wide) * inputs + config.hidden_size if inputs else 0, between)
