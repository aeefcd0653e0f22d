"""Which replica gets a request: the one that will have read its prompt soonest. Plain data, no Ray."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from longreach.cluster.prompt_key import PromptKey

# An open request delays a prompt as so many more prompt tokens would: its answer takes a part of every step.
OPEN_REQUEST_TOKENS = 256
# An owner of most of a prompt is left for nothing less than so much more to do than the others have: reports of that
# are a second old, and within a second it goes up and down by as much.
OWNER_TOKENS = 8192
# Differences of less than this are none: they are decided by the prompt, so that all routers decide alike.
TIE_TOKENS = 256
# Digests that are remembered of each replica: some two thousand prompts of 256K tokens, or many more short ones.
MEMORY_DIGESTS = 65536


@dataclass(frozen=True)
class Load:
    """What a replica has to do.

    Attributes:
        unread_tokens: prompt tokens that its engine has not computed.
        open_requests: requests that have not ended.
        ready: whether it takes requests at all.
    """

    unread_tokens: int = 0
    open_requests: int = 0
    ready: bool = True

    @property
    def tokens(self) -> int:
        """All of it, in prompt tokens."""
        return self.unread_tokens + OPEN_REQUEST_TOKENS * self.open_requests


class Placement:
    """Remembers which prompts each replica has had, and ranks replicas for a new one.

    A replica's cost is what it has to do before, and the part of the prompt that it has not had, in tokens. So a
    document's next question goes where its pages are, unless that replica has more to do than the others by as much as
    the document is long, and `OWNER_TOKENS` at least: from there on reading it again elsewhere is sooner done.
    """

    def __init__(self, memory_digests: int = MEMORY_DIGESTS) -> None:
        self._memory_digests = memory_digests
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def rank(self, key: PromptKey, loads: Mapping[str, Load]) -> list[str]:
        """The replicas in `loads`, by name, best first; those that are not ready last."""

        def cost(replica: str) -> tuple[bool, int, bytes]:
            load = loads[replica]
            tokens = load.tokens - self._saved(key, replica)
            return not load.ready, tokens // TIE_TOKENS, _lot(key.anchor, replica)

        return sorted(loads, key=cost)

    def _saved(self, key: PromptKey, replica: str) -> int:
        unread = key.tokens_beyond(self.shared_blocks(key, replica))
        saved = key.tokens - unread
        return max(saved, OWNER_TOKENS) if saved > key.tokens / 2 else saved

    def shared_blocks(self, key: PromptKey, replica: str) -> int:
        """How many of a prompt's first blocks a replica has had, as far as is remembered."""
        seen = self._seen.get(replica)
        if not seen or not key.chain:
            return 0
        known = zip(key.marks, key.chain, strict=True)
        return max((mark for mark, digest in known if digest in seen), default=0)

    def remember(self, replica: str, digests: Iterable[int]) -> None:
        """A replica has been given prompts with these digests; the last ones are remembered longest."""
        seen = self._seen.setdefault(replica, OrderedDict())
        for digest in digests:
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > self._memory_digests:
            seen.popitem(last=False)

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Forget replicas that are gone."""
        kept = set(replicas)
        self._seen = {name: seen for name, seen in self._seen.items() if name in kept}


def _lot(anchor: int, replica: str) -> bytes:
    """Rendezvous hashing: a replica more or less moves only the prompts that were or become its own."""
    return blake2b(replica.encode(), digest_size=8, key=anchor.to_bytes(8)).digest()
