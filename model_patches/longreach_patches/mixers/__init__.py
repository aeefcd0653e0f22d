"""Mixers over slots: what layers compute that keep a state in place of keys and values."""

from longreach_patches.mixers.mixer import MIXER, Mixer
from longreach_patches.mixers.patch import arrange_weights, patch_mixers, restore, spread_mixers

__all__ = ["MIXER", "Mixer", "arrange_weights", "patch_mixers", "restore", "spread_mixers"]
