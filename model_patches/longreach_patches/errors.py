"""Errors of the patches.

PatchError
├── UnsupportedModelError    the model needs something that the patches do not have
└── ModelLoadError           the files are missing, broken or not allowed
"""

from __future__ import annotations


class PatchError(Exception):
    """Base of all errors raised by longreach_patches."""


class UnsupportedModelError(PatchError):
    """The model, or the way it is called, needs something that the patches do not have; the message names it."""


class ModelLoadError(PatchError):
    """A model directory or hub id could not be turned into a model; the message names the file and the fault."""
