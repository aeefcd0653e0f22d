"""What may be drawn from a row of logits, in double precision and one row at a time: the sampler's specification."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from longreach.engine.messages import Sampling
from longreach.engine.sampling.sampler import NOT_A_NUMBER

# How far float32 may move a limit between two tokens, relative to the mass.
_ROUNDING = 1e-5


def adjusted(logits: np.ndarray, how: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> np.ndarray:
    """Logits (V,) float32 after penalties and bias."""
    found = logits.astype(np.float32)
    seen = {*generated} | ({*prompt} if how.repetition_penalty != 1 else set())
    with np.errstate(over="ignore"):
        for token in seen if how.penalizes else ():
            repetition = np.float32(how.repetition_penalty)
            old = found[token]
            count = generated.count(token)
            new = (old / repetition if old > 0 else old * repetition) - np.float32(how.frequency_penalty * count)
            found[token] = _finite(old, new - np.float32(how.presence_penalty if count else 0.0))
        for token, bias in how.logit_bias.items():
            found[token] = _finite(found[token], found[token] + np.float32(bias))
    return found


def _finite(old: np.float32, new: np.float32) -> np.float32:
    most = np.finfo(np.float32).max
    return old if old == -np.inf else np.clip(new, -most, most)


def is_right(token: int, logits: np.ndarray, how: Sampling, number: float) -> bool:
    """Whether `token` may be drawn from adjusted logits (V,) with the random `number`, rounding allowed for."""
    if not (logits < np.inf).all() or logits.max() == -np.inf:
        return token == NOT_A_NUMBER
    if how.temperature < 1e-5:
        return token == int(logits.argmax())
    exact = _drawn(logits, how, number)
    return token == exact or token in {
        _drawn(logits, how, number, *moved) for moved in product((-_ROUNDING, 0, _ROUNDING), repeat=3)
    }


def _drawn(
    logits: np.ndarray, how: Sampling, number: float, of_p: float = 0, of_min: float = 0, of_number: float = 0
) -> int:
    order = np.argsort(-logits, kind="stable")
    ordered = logits[order].astype(np.float64)
    mass = np.exp((ordered - ordered[0]) / how.temperature)
    rank = np.arange(len(mass))
    kept = (mass >= how.min_p * (1 + of_min)) & (rank < (how.top_k or len(mass))) | (rank == 0)
    mass = np.where(kept, mass, 0)
    before = np.cumsum(mass) - mass
    mass = np.where((before < how.top_p * (1 + of_p) * mass.sum()) | (rank == 0), mass, 0)
    cumulative = np.cumsum(mass[np.argsort(order)])
    target = min(max(number + of_number, 0), 1 - _ROUNDING / 2) * cumulative[-1]
    return int((cumulative <= target).sum())
