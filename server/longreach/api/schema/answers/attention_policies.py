"""What `/v1/attention` answers: the policies that a request may name, and the picture of a mask."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PolicyParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter of an attention policy; the bounds of a list are those of its members."""

    type: str
    values: list[str] | UnsetType = UNSET
    minimum: float | int | UnsetType = UNSET
    maximum: float | int | UnsetType = UNSET
    default: int | float | bool | str | list[int] | None
    description: str


class PolicyInfo(msgspec.Struct, frozen=True):
    """An attention policy."""

    policy: str
    description: str
    parameters: dict[str, PolicyParameter]


class AttentionPolicies(msgspec.Struct, frozen=True):
    """All policies that a request may name, and the one of requests that name none."""

    object: Literal["list"]
    data: list[PolicyInfo]
    default: str


class MaskPicture(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy sees of a prompt: shares of pairs and of tiles (`block` x `block`) that causal attention has.

    `grid` has a row for each stretch of queries and in it a number for each stretch of keys: the share of visible pairs
    there, 0 to 100. `exact` says whether all tiles were counted, or a sample.
    """

    policy: str
    parameters: dict[str, int | float | bool | str | list[int]]
    length: int
    block: int
    exact: bool
    density: float
    tiles_visited: int
    tiles_total: int
    flops_saved_share: float
    grid: list[list[int]]
