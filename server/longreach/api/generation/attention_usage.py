"""What the answers of one HTTP request tell of their attention, from what the engine says of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from longreach.api.schema.answers.usage import (
    AnswerKeptMass,
    AttentionUsage,
    DecodeUsage,
    KeptMass,
    MissedMass,
    PolicyLayers,
)
from longreach.engine.messages import AttentionUse, DecodeUse


def attention_usage(uses: Sequence[AttentionUse], answers: Collection[DecodeUse]) -> AttentionUsage | UnsetType:
    """The sum of what was computed for several prompts under one policy, and for `answers` to them; unset where nothing
    was, or all is dense."""
    if not uses:
        return UNSET
    dense_pairs = sum(use.dense_pairs for use in uses)
    parameters: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in uses[0].policy.parameters.items()
    }
    return AttentionUsage(
        policy=uses[0].policy.name,
        parameters=parameters,
        layers=PolicyLayers(**msgspec.structs.asdict(uses[0].layers)),
        density=sum(use.pairs for use in uses) / dense_pairs if dense_pairs else 1.0,
        tiles_visited=sum(use.tiles for use in uses),
        tiles_skipped=sum(use.dense_tiles - use.tiles for use in uses),
        flops_saved=sum(use.flops_saved for use in uses),
        kv_bytes_saved=sum(use.kv_bytes_saved for use in uses),
        kept_mass=_kept_mass(uses),
        tiles_unchosen=sum(use.unchosen for use in uses) if uses[0].policy.chooses_tiles else UNSET,
        decode=_decode(answers),
    )


def _decode(answers: Collection[DecodeUse]) -> DecodeUsage | UnsetType:
    if not answers:
        return UNSET
    tokens = sum(answer.queries for answer in answers)
    sampled = sum(answer.sampled for answer in answers)
    kept = None
    if sampled:
        mean = sum(answer.kept_mean * answer.sampled for answer in answers) / sampled
        kept = AnswerKeptMass(sampled, mean, min(answer.kept_least for answer in answers))
    return DecodeUsage(
        tokens=tokens,
        keys_visited=sum(answer.keys_read for answer in answers),
        keys_skipped=sum(answer.keys - answer.keys_read for answer in answers),
        kv_bytes_saved=sum(answer.kv_bytes_saved for answer in answers),
        missed_mass=MissedMass(
            sum(answer.missed_mean * answer.queries for answer in answers) / max(1, tokens),
            max(answer.missed_max for answer in answers),
        ),
        kept_mass=kept,
    )


def _kept_mass(uses: Sequence[AttentionUse]) -> KeptMass | None:
    """Of several prompts the mean of all sampled queries; the percentile is the worst of theirs, which is no more than
    that of all together."""
    measured = [use.kept_mass for use in uses if use.kept_mass is not None]
    if not measured:
        return None
    queries = sum(one.queries for one in measured)
    return KeptMass(
        queries,
        sum(one.mean * one.queries for one in measured) / queries,
        min(one.p5 for one in measured),
        min(one.least for one in measured),
    )
