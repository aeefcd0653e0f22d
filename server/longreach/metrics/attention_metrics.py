"""What policies computed and left out, as metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from longreach.engine.updates import AttentionUse, DecodeUse
from longreach.metrics.names import LABELS, SHARES

_TEXTS = {
    "density": "Pairs that a prompt was computed with under a policy, of dense attention's in full layers.",
    "kept_mass": "Mean part of the dense softmax's mass that a policy kept, on a prompt's sample.",
    "kept_mass_min": "The least of these parts in a prompt.",
    "decode_density": "Keys that an answer read under a decode budget, of those of dense attention.",
    "missed_mass": "Mean upper bound of the part of the dense softmax's mass that an answer missed.",
    "missed_mass_max": "The greatest of these bounds in an answer.",
    "decode_kept_mass": "Mean part of the dense softmax's mass that an answer kept, on its sample.",
    "decode_kept_mass_min": "The least of these parts in an answer.",
}


class AttentionMetrics:
    """Histograms of shares from 0 to 1, by the policy's name."""

    def __init__(self, registry: CollectorRegistry, names: tuple[str, str]) -> None:
        self._names = names
        self._shares = {
            name: Histogram(f"longreach:attention_{name}", text, (*LABELS, "policy"), buckets=SHARES, registry=registry)
            for name, text in _TEXTS.items()
        }

    def prompt(self, use: AttentionUse) -> None:
        """A prompt was read under a policy that is not dense."""
        policy = use.policy.name
        if use.dense_pairs:
            self._observe("density", policy, use.pairs / use.dense_pairs)
        if use.kept_mass is not None:
            self._observe("kept_mass", policy, use.kept_mass.mean)
            self._observe("kept_mass_min", policy, use.kept_mass.least)

    def answer(self, use: DecodeUse) -> None:
        """An answer ended that was written under a decode budget."""
        policy = use.policy.name
        if use.queries:
            self._observe("decode_density", policy, use.keys_read / use.keys)
            self._observe("missed_mass", policy, use.missed_mean)
            self._observe("missed_mass_max", policy, use.missed_max)
        if use.sampled:
            self._observe("decode_kept_mass", policy, use.kept_mean)
            self._observe("decode_kept_mass_min", policy, use.kept_least)

    def _observe(self, name: str, policy: str, share: float) -> None:
        self._shares[name].labels(*self._names, policy).observe(share)
