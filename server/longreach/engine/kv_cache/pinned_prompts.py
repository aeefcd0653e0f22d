"""Prompts whose entries are evicted last, in GPU memory, in host memory and on disk.

A pin is a preference. Nothing is computed, kept or refused for it: memory that a request needs is had from pinned
entries, too, once there are no others to evict. In GPU memory and host memory pinned entries come last as far as they
fill half of it; of more, those used longest ago are as good as others.

A pin is known by a name, and covers what the prompt needs at its end, whether that is here or comes later:

    group of layers | pinned
    ----------------+--------------------------------------------------------------------------
    full            | all full pages of the prompt
    window          | the pages that its last full page, and the one before it, need
    state           | copies within the last 2,048 tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from longreach.engine.kv_cache.borders import STATE_GROUP, TAIL_TOKENS, key
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.prefix_cache import PageHasher


class Tier(Protocol):
    """What holds entries by key, and evicts some."""

    def use_names(self, names: Iterable[tuple[bytes, int]]) -> None:
        """Note when the entries with these keys, as far as they are here, were used, see `last_use`."""
        ...

    def pin_names(self, names: Sequence[bytes]) -> None:
        """Evict the entries with these keys last, in this order, whether they are here or come."""
        ...

    def unpin_names(self, names: Sequence[bytes]) -> None:
        """Evict the entries with these keys, in this order, before others, unless they are used again."""
        ...


class PinnedPrompts:
    """Pins of prompts in some `tiers`. Without a `hasher` there is no prefix cache, and nothing to pin.

    Keys of states are pinned where the model has `states`.
    """

    def __init__(self, tiers: Sequence[Tier], groups: PageGroups, hasher: PageHasher | None, *, states: bool) -> None:
        self._tiers = tiers
        self._groups = groups
        self._hasher = hasher
        self._states = states
        self._names: dict[str, list[bytes]] = {}
        self._count: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """How many prompts are pinned."""
        return len(self._names)

    def pin(self, name: str, tokens: Sequence[int], salt: str = "", contents: str = "") -> None:
        """Have a prompt's entries evicted last until `unpin`, in place of what the name has pinned before.

        `salt` is the tenant's, `contents` as `rope_choice.contents_key` says.
        """
        digests: list[bytes] = []
        if self._hasher is not None:
            self._hasher.extend(digests, tokens, salt, contents)
        keys = self._keys(digests)
        new = [entry for entry in keys if not self._count[entry]]
        self._count.update(keys)
        for tier in self._tiers:
            tier.pin_names(new)
        self.unpin(name)
        self._names[name] = keys

    def unpin(self, name: str) -> None:
        """End a pin, if there is one of this name."""
        keys = self._names.pop(name, [])
        self._count.subtract(keys)
        gone = [entry for entry in keys if not self._count[entry]]
        for entry in gone:
            del self._count[entry]
        for tier in self._tiers:
            tier.unpin_names(gone)

    def _keys(self, digests: list[bytes]) -> list[bytes]:
        """What has to be there for a prompt whose last full page has the last digest: the last pages first, which are
        evicted before the others."""
        groups, end = self._groups, len(digests)
        firsts = [0 if window is None else groups.first(group, end - 1) for group, window in enumerate(groups.windows)]
        keys = [
            key(digests[page], group)
            for page in range(end - 1, -1, -1)
            for group, first in enumerate(firsts)
            if page >= first
        ]
        if self._states:
            tail = -(-TAIL_TOKENS // groups.page_size)
            keys += [key(digest, STATE_GROUP) for digest in digests[-tail:]]
        return keys
