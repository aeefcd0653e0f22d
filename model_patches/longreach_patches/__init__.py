"""longreach's kernels inside Hugging Face models: patch(model), KV pages, and loading."""

from longreach_patches.agreement import check_agreement, compared_tokens, compute_both
from longreach_patches.batch_invariant import check_ranks
from longreach_patches.cache.groups import LayerGroup
from longreach_patches.cache.pages import KVPages
from longreach_patches.cache.scales import KVScales, resolve_kv_dtype
from longreach_patches.cache.shape import LayerPages, PageShape
from longreach_patches.cache.states import NO_SLOT, StateShape, StateStep, StateStore
from longreach_patches.cache.step import KeptQueries, PagedStep, QueryTap, WantedRows
from longreach_patches.checkpoint import check_files_if_any
from longreach_patches.errors import ModelLoadError, PatchError, UnsupportedModelError
from longreach_patches.families import FAMILIES, attention_layers, head_shape, layer_masks, rotary_layers, state_layers
from longreach_patches.footprint import Footprint
from longreach_patches.layout import SINGLE, RankLayout, check_layout
from longreach_patches.loader import (
    LoadedModel,
    load_config,
    load_model,
    resolve_device,
    resolve_dtype,
)
from longreach_patches.patch import PatchedModel, patch
from longreach_patches.policy_step import (
    BlockBudget,
    GroupMeasurements,
    MassSample,
    StepGroup,
    StepMeasurements,
    chosen_layers,
    masks_under,
)
from longreach_patches.quantized import brings_kv_scales, scheme_of
from longreach_patches.rope_tables import PLACE_MASK, ROW_SHIFT, RopeTable
from longreach_patches.tile_choice import ChoicePart, TileChoice, TileProbe
from longreach_patches.weight_sources import check_split

__all__ = [
    "FAMILIES",
    "NO_SLOT",
    "PLACE_MASK",
    "ROW_SHIFT",
    "SINGLE",
    "BlockBudget",
    "ChoicePart",
    "Footprint",
    "GroupMeasurements",
    "KVPages",
    "KVScales",
    "KeptQueries",
    "LayerGroup",
    "LayerPages",
    "LoadedModel",
    "MassSample",
    "ModelLoadError",
    "PageShape",
    "PagedStep",
    "PatchError",
    "PatchedModel",
    "QueryTap",
    "RankLayout",
    "RopeTable",
    "StateShape",
    "StateStep",
    "StateStore",
    "StepGroup",
    "StepMeasurements",
    "TileChoice",
    "TileProbe",
    "UnsupportedModelError",
    "WantedRows",
    "attention_layers",
    "brings_kv_scales",
    "check_agreement",
    "check_files_if_any",
    "check_layout",
    "check_ranks",
    "check_split",
    "chosen_layers",
    "compared_tokens",
    "compute_both",
    "head_shape",
    "layer_masks",
    "load_config",
    "load_model",
    "masks_under",
    "patch",
    "resolve_device",
    "resolve_dtype",
    "resolve_kv_dtype",
    "rotary_layers",
    "scheme_of",
    "state_layers",
]
