"""How much of its prompt a query sees under an attention policy, in three numbers, for predictions of time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from longreach.engine.cost_model import Reach
from longreach.engine.messages import AttentionPolicy

_BLOCK = 128  # of the block patterns: `longreach_kernels.masks.block_rules.BLOCK`
_BOUNDS = 1 / 16  # what the bounds of keys take beside them: a key's least and greatest for 16 keys and values


@lru_cache(maxsize=256)
def reach_of(policy: AttentionPolicy, dense_share: float) -> Reach | None:
    """The mean over a model's full layers, `dense_share` of which see everything; None where that is all of them."""
    parameters: dict[str, Any] = dict(policy.parameters)
    base, share = _reach(policy.name, parameters)
    share = dense_share + (1 - dense_share) * share
    whole = parameters["dense_below"] if policy.is_dynamic else 0
    return None if share >= 1 else Reach((1 - dense_share) * base, share, whole)


def _reach(name: str, of: dict) -> tuple[float, float]:
    if name == "window":
        return of["size"] + of["sinks"], 0.0
    if name == "a_shape":
        return of["window"] + of["sinks"], 0.0
    if name == "local_global":
        return of["window"] + of["global_tokens"], 0.0
    if name == "bigbird":
        return of["window"] + of["global_tokens"] + of["random_blocks"] * _BLOCK, 0.0
    if name == "strided":
        halves = 0.5 if of["per_head"] else 1.0
        return halves * of["stride"], halves * _BLOCK / of["stride"]
    if name == "vertical_slash":
        columns = {position // _BLOCK for position in of["verticals"]}
        diagonals = {0} | {block for x in of["slashes"] for block in (x // _BLOCK, -(-x // _BLOCK))}
        return (len(columns) + len(diagonals)) * _BLOCK, 0.0
    if name == "decode":  # and the bounds of all blocks
        return of["decode_budget"], _BOUNDS
    if name == "dynamic" and "density" in of:
        return 0.0, of["density"]
    if name == "dynamic" and "speedup" in of:
        return 0.0, 1 / of["speedup"]
    return 0.0, 1.0  # dense, or what the prompt alone decides
