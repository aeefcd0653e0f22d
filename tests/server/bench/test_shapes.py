"""The shapes that are measured are published models', and their weights take what those take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from longreach.bench import shapes
from longreach.bench.launch import described
from longreach_patches import Footprint, load_config
from longreach_patches.families import FAMILIES


def weight_bytes(shape: str, layers: int, folder: Path) -> int:
    shapes.write(shape, folder)
    fewer: dict[str, object] = {"num_hidden_layers": layers}
    if "layer_types" in shapes.SHAPES[shape]:
        fewer["layer_types"] = shapes.SHAPES[shape]["layer_types"][:layers]
    config = load_config(str(folder), fewer)
    assert config.model_type in FAMILIES
    return Footprint.of(config, torch.bfloat16, 128).weight_bytes


# A layer's weights, as the published files have them, in MiB.
@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ("llama-8b", 416),
        ("llama-8b-int4", 107.3),
        ("qwen3-30b-a3b", 1188.5),
        ("qwen3-30b-a3b-fp8", 594.6),
        ("gpt-oss-20b", 454.8),
        # 64 experts of 6 MiB, one for all, and their choice; three layers with a state of 64.3 MiB and one without, 52.
        ("qwen3-next-64e", 64 * 6 + 6 + 0.25 + (3 * 64.3 + 52) / 4),
    ],
)
def test_a_layer_takes_what_the_published_one_takes(shape: str, layer: float, tmp_path: Path) -> None:
    few, more = (weight_bytes(shape, count, tmp_path / str(count)) for count in (4, 8))
    assert (more - few) / 4 / 2**20 == pytest.approx(layer, rel=2e-3)


@pytest.mark.parametrize("shape", sorted(shapes.SHAPES))
def test_results_name_the_format_of_the_weights(shape: str) -> None:
    declared = {"llama-8b-int4": "compressed-tensors", "qwen3-30b-a3b-fp8": "fp8", "gpt-oss-20b": "mxfp4"}
    assert described(shape).get("quantization") == declared.get(shape)
