"""The settings that the suite `ruler-like` compares where none are named: every policy, and budgets for answers."""

from __future__ import annotations

from typing import Any

from longreach.bench.policy_sweep import Policy
from longreach.sizes import TILE

EARLY = 1024
"""Where `dynamic` begins to choose keys here. Its default, 8,192, is for speed, and reads shorter prompts whole."""


def _setting(policy: str, **parameters: Any) -> dict[str, Any]:
    return {"policy": policy, **parameters}


SETTINGS: tuple[dict[str, Any], ...] = (
    *(_setting("dynamic", recall=recall, dense_below=EARLY) for recall in (0.8, 0.9, 0.95, 0.98)),
    *(_setting("dynamic", density=density, dense_below=EARLY) for density in (0.1, 0.2, 0.3)),
    *(_setting("dynamic", estimator="moments", recall=recall, dense_below=EARLY) for recall in (0.9, 0.95)),
    _setting("dynamic", estimator="pooled", recall=0.9, dense_below=EARLY),
    *(_setting("dynamic", recall=1, decode_budget=budget) for budget in (256, 1024, 2048)),
    *(_setting("window", size=size) for size in (1024, 4096, 8192)),
    *(_setting("a_shape", window=window) for window in (1024, 4096)),
    *(_setting("strided", stride=stride) for stride in (512, 2048)),
    *(_setting("local_global", window=window) for window in (1024, 4096)),
    *(_setting("bigbird", window=window, random_blocks=blocks) for window, blocks in ((1024, 8), (4096, 32))),
    _setting("vertical_slash", slashes=[128 * i for i in range(16)]),
)

_SIZES = ("size", "window", "stride", "decode_budget")


def worth_asking(policy: Policy, length: int) -> bool:
    """Whether a setting leaves anything out of a prompt of `length` tokens: a window as long as the prompt does not."""
    attention = policy.attention
    if not isinstance(attention, dict):
        return True
    farthest = max(attention.get("slashes", [0])) + TILE
    return all(size < length for size in (farthest, *(attention.get(name, 0) for name in _SIZES)))
