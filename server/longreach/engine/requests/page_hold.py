"""What a request holds of the KV cache. Plain data, which `kv_cache.allocator` alone writes to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class PageHold:
    """Pages of one request.

    Attributes:
        pages: ids of its pages, in the order of its tokens. A request that comes back after a preemption has a new
            list: whoever keeps a copy tells by the list's identity.
        reserved: pages that it may still have allocated, without being refused.
        digests: of its full pages, as far as they have been asked for; none without a prefix cache.
        cached_tokens: how many of its prompt's tokens were in the prefix cache before it was first preempted.
        cached_until: the position up to which its tokens were computed or cached, when that was last looked up.
    """

    pages: list[int] = field(default_factory=list)
    reserved: int = 0
    digests: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    cached_until: int = 0
