"""The token budget of a step where none is set."""

from __future__ import annotations

from typing import Any

import pytest
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.capacity import batched_tokens
from longreach_patches import Footprint


@pytest.mark.parametrize(
    ("memory", "scratch", "options", "expected"),
    [
        (None, 1, {}, 512),
        (80 << 30, 0, {}, 8192),
        (80 << 30, 1, {}, 16384),
        (64 << 30, 1, {}, 16384),
        ((64 << 30) - 1, 1, {}, 8192),
        (80 << 30, 1, {"batch_invariant": True}, 8192),  # nothing is unpacked then
        (80 << 30, 1, {"max_batched_tokens": 300}, 300),
    ],
)
def test_steps_are_longer_where_weights_are_unpacked_in_each(
    memory: int | None, scratch: int, options: dict[str, Any], expected: int
) -> None:
    footprint = Footprint(0, None, 1, 1, scratch)  # type: ignore[arg-type]
    config = EngineConfig(model="", **options)
    assert batched_tokens(config, footprint, memory) == expected
    ranks = 1 if options.get("max_batched_tokens") else 2
    assert batched_tokens(config, footprint, memory, 2) == ranks * expected
