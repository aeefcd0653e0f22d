"""What the engine tells of requests: their tokens, what their attention left out, and what they took of the cache.

Records of `messages`, of which `Updates` is one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from longreach.engine.cost_model import StepCost
from longreach.policies.values import AttentionPolicy

FinishReason = Literal["stop", "length"]


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a token where it stands, and the likeliest tokens there with theirs, likeliest first.

    They are the model's own: before penalties, bias, grammar and temperature. None is below LEAST_LOGPROB.
    """

    token: int
    logprob: float
    top_tokens: list[int] = []
    top_logprobs: list[float] = []


class AttendedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of 16 tokens of the prompt that one token of an answer attended to most, the best first, and their
    scores: the sum over heads and some layers of the squared part of the softmax that lies on the block.

    The first block and those of the prompt's last 32 tokens are left out.
    """

    blocks: list[int] = []
    scores: list[float] = []


class KeptMass(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the dense softmax's mass that lies on the keys a policy lets be seen: mean, 5th percentile and least
    of the sampled `queries` of a prompt, over all heads of all layers that the policy changes."""

    queries: int
    mean: float
    p5: float
    least: float


class FloorUse(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of a prompt under a floor of the kept mass, `min_mass`.

    A row is a tile of queries, a KV head and a layer in which something could be left out; `drawn` queries of each were
    looked at. The other fields are those of `longreach.engine.requests.floor_tests.FloorFound`.
    """

    min_mass: float
    drawn: int
    rows: int
    widened: int
    dense: int
    kept_mean: float
    kept_least: float
    chosen_least: float
    below: float
    below_most: float
    confidence: float


class LayerCount(msgspec.Struct, frozen=True, array_like=True):
    """How many of a model's layers a policy changes, in the prompt or in the answer, and how many are of each kind:
    those that see everything, those with a window of their own, and those that keep a state in place of keys."""

    changed: int
    full: int
    window: int
    state: int


class AttentionUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt was computed with under a policy that is not dense, beside what dense attention computes.

    Pairs of a query and a key, and tiles of 128 by 128 of them, are summed over query heads and layers: those that see
    everything, and those with windows that the policy narrows. `other_pairs` are those of the other layers. The dense
    ones are those that the layers' own masks leave. They are of the part of the prompt that was computed, not found in
    the cache. FLOPs and bytes of keys and values are those of the tiles that were skipped, before any cache.
    `kept_mass` is None where no layer is changed whose mass is measured. Under a dynamic policy tiles are the kernel's
    own, of the layers where they are chosen, and pairs follow from them; `unchosen` of them are in layers and spans
    where choosing was not worth what it costs.
    """

    policy: AttentionPolicy
    layers: LayerCount
    pairs: int
    dense_pairs: int
    tiles: int
    dense_tiles: int
    flops_saved: int
    kv_bytes_saved: int
    other_pairs: int = 0
    unchosen: int = 0
    kept_mass: KeptMass | None = None
    floor: FloorUse | None = None


class DecodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the tokens of an answer that could not read all keys have read so far, in the layers where keys are chosen.

    There are `queries` of them. Keys are summed over tokens, layers and KV heads: those that dense attention reads, and
    those that were `read`. `kv_bytes_saved` are the bytes of the others, less those of the bounds that were read in
    their place. What was missed of the attention is at most `missed_mean` on average over tokens, layers and query
    heads, and nowhere more than `missed_max`. What was kept was measured on `sampled` of the tokens: `kept_mean` of the
    dense softmax's mass, and nowhere less than `kept_least`. In a share of `whole_share` of tokens and layers all keys
    were read, since the budget did not keep the policy's `min_mass` for certain.
    """

    policy: AttentionPolicy
    queries: int
    keys: int
    keys_read: int
    kv_bytes_saved: int
    missed_mean: float = 0.0
    missed_max: float = 0.0
    sampled: int = 0
    kept_mean: float = 1.0
    kept_least: float = 1.0
    whole_share: float = 0.0


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request after a step.

    `computed` of `prompt_tokens` prompt tokens have their keys and values, `cached` of them by somebody else's work: of
    those `cached_host` were brought back from host memory, and `cached_disk` from disk.
    `tokens` are new ones (none while the prompt is being read); `finish_reason` is set on a request's last update.
    `waited` is how long the request was in the engine before its first step began, in seconds. If they were asked for,
    `logprobs` has one for each of `tokens`, and `prompt_logprobs` those of the prompt's tokens that follow the ones
    already told; the prompt's first token has none. The update with the first token has the `attention` of a request
    that is not dense, and each one with tokens the `decode` of a request with a decode budget.

    `compiling`: the request waits for kernels that are compiled beside the steps, until its next update. `attended` has
    one for each of the `tokens` of a request that asked for places.
    """

    request_id: str
    prompt_tokens: int
    computed: int
    cached: int = 0
    cached_host: int = 0
    cached_disk: int = 0
    tokens: list[int] = []
    finish_reason: FinishReason | None = None
    waited: float = 0.0
    logprobs: list[Logprob] = []
    prompt_logprobs: list[Logprob] = []
    attention: AttentionUse | None = None
    decode: DecodeUse | None = None
    compiling: bool = False
    attended: list[AttendedBlocks] = []


class Updates(msgspec.Struct, frozen=True, tag=True):
    """All updates of one step, and what a step is now known to cost, if prompts were read in it."""

    updates: list[Update]
    cost: StepCost | None = None
