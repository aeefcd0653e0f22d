"""A look: what a prompt would get from the caches now, and when its first token would come. It changes nothing.

The owner makes the digests of the prompt's pages, which takes milliseconds for a long one, and sends these in place of
its tokens. The engine answers between two steps.
"""

from __future__ import annotations

import msgspec

from longreach.policies.values import DENSE, AttentionPolicy


class Look(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A question about a request that is not sent: one of `prompt_tokens` tokens, whose full pages have these
    `digests`, of 32 bytes each, one behind the other; none without a prefix cache.

    `max_tokens`, `priority`, `flexible`, `attention` and `rope_factor` are those of `Generate`; with so many `answers`,
    that share the prompt.
    """

    look_id: int
    prompt_tokens: int
    digests: bytes = b""
    max_tokens: int = 1
    answers: int = 1
    priority: int = 0
    flexible: bool = False
    attention: AttentionPolicy = DENSE
    rope_factor: float = 0.0


class Looked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a request would get now. Of its `total` prompt tokens the first ones are cached: `gpu` of them are on the
    device, `host` come back from host memory, and `disk` from disk, as far as host memory has room for what is read.

    Entries of the cache (pages and copies of states) take `gpu_bytes`, `host_bytes` and `disk_bytes` there, on all
    ranks together. The answers together hold `kv_bytes` when they have begun, cached pages of the prompt included;
    `fits_now` says whether pages and places for them are free.

    Predictions are in seconds from now to the first token, None where nothing is known of what steps cost, or of how
    long it takes to bring back what is not on the device:
    `seconds_alone` if the server did nothing else, `seconds_whole` if nothing were cached either, `seconds_dense` if
    attention were dense, too, and `seconds_now` behind those `ahead` that are here and come first, and beside the
    answers that are being written.
    """

    look_id: int
    total: int
    gpu: int = 0
    host: int = 0
    disk: int = 0
    gpu_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    kv_bytes: int = 0
    fits_now: bool = True
    ahead: int = 0
    seconds_alone: float | None = None
    seconds_whole: float | None = None
    seconds_dense: float | None = None
    seconds_now: float | None = None

    @property
    def cached(self) -> int:
        """Tokens of the prompt that need not be computed."""
        return self.gpu + self.host + self.disk
