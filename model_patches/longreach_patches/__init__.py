"""longreach's kernels inside Hugging Face models: patch(model), KV pages, and loading."""

from .batch_invariant import check_ranks
from .errors import ModelLoadError, PatchError, UnsupportedModelError
from .families import FAMILIES, layer_masks, rotary_layers
from .footprint import Footprint
from .layout import SINGLE, RankLayout, check_layout
from .loader import LoadedModel, load_config, load_model, resolve_device, resolve_dtype
from .pages import KVPages, KVScales, PagedStep, PageShape, WantedRows, resolve_kv_dtype
from .patch import PatchedModel, patch
from .policy_step import BlockBudget, MassSample, StepGroup, TileChoice, chosen_layers, masks_under
from .rank_sums import SmallSums

__all__ = [
    "FAMILIES",
    "SINGLE",
    "BlockBudget",
    "Footprint",
    "KVPages",
    "KVScales",
    "LoadedModel",
    "MassSample",
    "ModelLoadError",
    "PageShape",
    "PagedStep",
    "PatchError",
    "PatchedModel",
    "RankLayout",
    "SmallSums",
    "StepGroup",
    "TileChoice",
    "UnsupportedModelError",
    "WantedRows",
    "check_layout",
    "check_ranks",
    "chosen_layers",
    "layer_masks",
    "load_config",
    "load_model",
    "masks_under",
    "patch",
    "resolve_device",
    "resolve_dtype",
    "resolve_kv_dtype",
    "rotary_layers",
]
