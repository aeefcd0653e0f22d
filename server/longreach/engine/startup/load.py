"""What a rank loads before it measures anything: the model, or its part of it, and what its config says."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from dataclasses import dataclass

import torch
from longreach_kernels import Mask, decode_needs, list_tiles
from longreach_patches import (
    Footprint,
    KVPages,
    LoadedModel,
    PageShape,
    StateStore,
    brings_kv_scales,
    head_shape,
    layer_masks,
    load_model,
    resolve_kv_dtype,
    rope,
    rope_tables,
    rotary_layers,
)
from longreach_patches.families import family_of
from transformers.utils import logging as transformers_logging

from longreach import gguf_source
from longreach.engine.device.forward_pass import StepGraphs
from longreach.engine.device.policies.layer_masks import LayerPolicies
from longreach.engine.device.ranks.process_group import Joined, in_turn
from longreach.engine.messages import EngineConfig
from longreach.engine.scheduling.limits import Limits
from longreach.engine.startup import capacity

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedRank:
    """A model on a rank, and what is known of its needs before there are pages.

    Attributes:
        config: as the engine was asked to start.
        loaded: the model, or this rank's part of it.
        own_masks: the layers' own masks, first to last.
        footprint: sizes of weights and pages.
        demand: what the model needs of the device's memory.
        policies: the layers' masks under attention policies.
        batched_tokens: the token budget of a step.
    """

    config: EngineConfig
    loaded: LoadedModel
    own_masks: tuple[Mask, ...]
    footprint: Footprint
    demand: capacity.Demand
    policies: LayerPolicies
    batched_tokens: int

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return self.loaded.device.type == "cuda"

    @property
    def scales_pages(self) -> bool:
        """Whether keys and values are kept in another type than the model's, which takes scales."""
        return self.footprint.pages.dtype != self.loaded.dtype

    def graphs(
        self, pages: KVPages, drawn: torch.Tensor, limits: Limits, states: StateStore | None = None
    ) -> StepGraphs:
        """The graphs of steps over these pages and states, with nothing captured yet; `drawn` as for `ForwardPass`."""
        backend = self.loaded.patched.backend.name
        needs = functools.partial(decode_needs, *_alike(self.loaded, self.footprint), backend=backend)
        return StepGraphs.of(self.loaded, self.policies, needs, pages, drawn, limits, states)


def load_rank(config: EngineConfig, joined: Joined) -> LoadedRank:
    """Load a rank's part of the model, one rank after another.

    Raises:
        longreach_patches.PatchError: the model cannot be loaded or is not supported.
        ValueError: the settings cannot hold together; the message names the fix.
    """
    transformers_logging.disable_progress_bar()  # it would be drawn between the lines of the server's log
    layout = joined.layout
    # Files may have to be on the host as a whole for a moment; random weights are drawn on the ranks' devices.
    with contextlib.nullcontext() if config.random_weights else in_turn(joined):
        loaded = load_model(
            config.model,
            device=config.device,
            dtype=config.dtype,
            backend=config.attention_backend,
            random_weights=config.random_weights,
            batch_invariant=config.batch_invariant,
            layout=layout,
            overrides=config.hf_overrides,
            max_length=config.max_model_len,
            gguf_file=config.gguf_file,
            quantization=config.quantization,
            rope_by_request=config.rope_by_request,
        )
    if joined.layout.rank == 0:
        logger.info("%s", layers_in_words(loaded))
        if loaded.rope_tables:
            logger.info("%s", rope_tables.described(loaded.rope_tables))
        elif (note := rope.described(loaded.config, config.max_model_len or loaded.max_positions)) is not None:
            logger.info("%s", note)
    on_gpu = loaded.device.type == "cuda"
    if on_gpu and layout.size > 1:
        torch.cuda.empty_cache()  # what whole weights took before they were cut
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, loaded.dtype, loaded.device, brings_kv_scales(loaded.config))
    own = layer_masks(loaded.config)
    bounded = capacity.bounded_layers(config, own, layout)
    if brings_kv_scales(loaded.config) and loaded.kv_scales is None and not config.random_weights:
        logger.warning("the checkpoint declares scales of keys and values and has none: they are measured at the start")
    arch = capacity.arch_of(loaded.device)
    planned = Footprint.of(loaded.config, loaded.dtype, config.page_size, kv_dtype, layout, bounded, arch)
    footprint = dataclasses.replace(planned, weight_bytes=loaded.weight_bytes)
    memory = torch.cuda.get_device_properties(loaded.device).total_memory if on_gpu else None
    batched_tokens = capacity.batched_tokens(config, footprint, memory, layout.context_size)
    policies = LayerPolicies(
        own,
        head_shape(loaded.config).heads,
        PageShape.of(loaded.config, kv_dtype, config.page_size, bounded=bounded),
        tuple(config.attention_dense_layers),
        tile=list_tiles(*_alike(loaded, footprint), backend=loaded.patched.backend.name),
        step_tokens=batched_tokens,
        part=layout.part(head_shape(loaded.config).heads),
        rotary=rotary_layers(loaded.config),
        is_cut=loaded.patched.leaves_rows_out and layout.context_size == 1,
    )
    if config.gguf_file is not None and layout.rank == 0 and not config.random_weights:
        sizes = str(loaded.dtype), footprint.weight_bytes, loaded.quantization
        logger.info("%s", gguf_source.dequantized(config.gguf_file, *sizes))
    demand = capacity.Demand.of(footprint, loaded.config, config, batched_tokens)
    return LoadedRank(config, loaded, own, footprint, demand, policies, batched_tokens)


def layers_in_words(loaded: LoadedModel) -> str:
    """Which of the two ways computes steps, and why, for people."""
    config = loaded.config
    if loaded.patched.fused:
        weights = "" if loaded.quantization is None else f", with quantised weights: {loaded.quantization}"
        return f"layers are fused: there are fused kernels for the family {config.model_type}{weights}"
    why = f"for the family {config.model_type} there are no fused ones"
    if (parts := family_of(config).parts) is not None:
        why = f"{parts.whole or 'projections that cannot be cut'} keep fused ones from being split over ranks"
    words = f"layers are transformers' own, with our attention: {why}; a token takes more launches"
    if loaded.whole_bytes:
        words += (
            f"; {capacity.readable(loaded.whole_bytes)} of their weights cannot be split over "
            f"{loaded.layout.tensor_size} ranks, and each rank has and computes all of these"
        )
    return words


def _alike(loaded: LoadedModel, footprint: Footprint) -> tuple[torch.Tensor, torch.Tensor]:
    """A query and a page of the kind that attention is computed of."""
    shape = footprint.pages
    heads = len(loaded.layout.part(head_shape(loaded.config).heads))
    q = torch.empty((1, heads, shape.head_dim), dtype=loaded.dtype, device=loaded.device)
    size = (1, shape.page_size, shape.num_kv_heads, shape.head_dim)
    return q, torch.empty(size, dtype=shape.dtype, device=loaded.device)
