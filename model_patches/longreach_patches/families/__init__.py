"""What is known of each model family, as data, and what follows from a model's config."""

from longreach_patches.families.family import Family, LayerMask
from longreach_patches.families.parts import (
    ConvolutionParts,
    DeltaParts,
    LayerParts,
    MixerParts,
    Mixture,
    NormKind,
    OutputGate,
    Rotary,
    SsmParts,
)
from longreach_patches.families.read import (
    HeadShape,
    attention_layers,
    expert_inner,
    experts_per_token,
    family_of,
    head_shape,
    head_shapes,
    layer_masks,
    layer_sources,
    rotary_layers,
    state_layers,
    widest_inner,
)
from longreach_patches.families.table import FAMILIES, LEFT_OUT

__all__ = [
    "FAMILIES",
    "LEFT_OUT",
    "ConvolutionParts",
    "DeltaParts",
    "Family",
    "HeadShape",
    "LayerMask",
    "LayerParts",
    "MixerParts",
    "Mixture",
    "NormKind",
    "OutputGate",
    "Rotary",
    "SsmParts",
    "attention_layers",
    "expert_inner",
    "experts_per_token",
    "family_of",
    "head_shape",
    "head_shapes",
    "layer_masks",
    "layer_sources",
    "rotary_layers",
    "state_layers",
    "widest_inner",
]
