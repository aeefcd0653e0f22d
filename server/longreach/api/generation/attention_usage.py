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
    DrawnMass,
    Guarantee,
    KeptMass,
    MissedMass,
    PolicyLayers,
    QueriesBelow,
    ReadAgain,
)
from longreach.engine.updates import AttentionUse, DecodeUse


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
        guarantee=_guarantee(uses),
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
        read_again=sum(answer.whole_share * answer.queries for answer in answers) / max(1, tokens),
    )


def _guarantee(uses: Sequence[AttentionUse]) -> Guarantee | UnsetType:
    """Of several prompts the sums, and what is said of queries below for the worst of them: a bound holds for each."""
    tests = [use.floor for use in uses if use.floor is not None]
    if not tests:
        return UNSET
    rows = sum(one.rows for one in tests)
    again = sum(one.widened for one in tests), sum(one.dense for one in tests)
    return Guarantee(
        min_mass=tests[0].min_mass,
        rows=rows,
        drawn_queries=tests[0].drawn,
        drawn_mass=DrawnMass(
            sum(one.kept_mean * one.rows for one in tests) / rows if rows else 1.0,
            min(one.kept_least for one in tests),
            min(one.chosen_least for one in tests),
        ),
        read_again=ReadAgain(*again, sum(again) / rows if rows else 0.0),
        queries_below=QueriesBelow(
            max(one.below for one in tests), max(one.below_most for one in tests), tests[0].confidence
        ),
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
