"""How a family chooses a token's experts and weighs them, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Scores = Literal["softmax", "sigmoid", "softmax_of_chosen", "sparse_mixer"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True)
class Routing:
    """From the E logits of a token to its k experts and their weights. All of it is computed in fp32.

    Experts are chosen by their scores, plus a correction where the model has one. A weight is the chosen expert's score
    without the correction. Of equal scores the lower expert comes first. Sigmoids of large logits are equal, so without
    a correction and groups the logits choose.

    Attributes:
        top_k: experts of a token.
        scores: "softmax" over all experts (Qwen, Mixtral), "sigmoid" (DeepSeek-V3, GLM, MiniMax),
            "softmax_of_chosen", which chooses by logits and takes the softmax over the chosen (gpt-oss, Granite), or
            "sparse_mixer" (Liu et al. 2023, Phi-3.5-MoE): one expert after another is chosen by its logit, and weighed
            by the softmax over the experts that are left and are near it, see `jitter`.
        renormalise: whether weights are divided by their sum.
        epsilon: what is added to that sum.
        least_sum: the least that weights are divided by (ERNIE's `moe_norm_min`).
        factor: what weights are multiplied by at last.
        groups: equal runs of experts, of which a token uses `top_groups` (DeepSeek-V3, section 2.1.2).
        group_score: a group's score: that of its best expert, or the sum of its best two.
        softcap: logits become softcap * tanh(logits / softcap) first; None for no bound.
        jitter: an expert with logit s is near one with the greatest logit m if (m - s) / max(abs(s), m) is at most
            twice this.
    """

    top_k: int
    scores: Scores = "softmax"
    renormalise: bool = False
    epsilon: float = 0.0
    least_sum: float = 0.0
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2"
    softcap: float | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.scores not in (known := get_args(Scores)):
            raise ValueError(f"scores: {self.scores!r} is not one of {', '.join(map(repr, known))}")
        if self.scores == "sparse_mixer" and self.groups > 1:
            raise ValueError(f"groups: a sparse mixer has none, got {self.groups}")
        if self.group_score not in ("max", "top2"):
            raise ValueError(f"group_score: {self.group_score!r} is neither 'max' nor 'top2'")
        if self.top_k < 1:
            raise ValueError(f"top_k: must be at least 1, got {self.top_k}")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups: must lie between 1 and groups={self.groups}, got {self.top_groups}")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap: must be positive, got {self.softcap}; use None for no bound")

    def check(self, experts: int) -> None:
        """See whether so many experts can be chosen from.

        Raises:
            ValueError: groups do not divide them, or there are fewer than `top_k` to choose from.
        """
        if experts % self.groups:
            raise ValueError(f"groups: {self.groups} groups do not divide {experts} experts")
        in_group = experts // self.groups
        if self.groups > 1 and self.group_score == "top2" and in_group < 2:
            raise ValueError(f"group_score: 'top2' needs two experts in each of {self.groups} groups, of {experts}")
        if self.top_k > self.top_groups * in_group:
            raise ValueError(f"top_k: {self.top_k} experts of {self.top_groups * in_group} cannot be chosen")
