"""Up to which border a request can share cached pages, and which pages of windows are kept for borders.

A prefix is usable up to a border at which every group has what it needs: a full group all pages before it, a window
group those of the window before it.

A window's pages are dropped as it goes on. Those that are cached stay so while nobody needs their memory, and are given
up before all others. Some are worth as much as any cached page, since somebody may return to their border:

    border                                   | who returns
    -----------------------------------------+-------------------------------------------------------------
    each within the prompt's last 2,048      | another question on the same document, or about it
    tokens                                   |
    every 16,384 tokens                      | a prompt that begins alike and turns off somewhere
    where the cache ended for this request   | whoever turns off there, as this one did
    the end of the answer                    | the conversation's next turn; its pages are held until then
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.requests.request import Request

# The last tokens of a prompt whose borders are all kept: as long as a question behind a document may be.
TAIL_TOKENS = 2048
# Tokens between two borders that are kept in a long prompt.
SPACING_TOKENS = 16384
# Stands for the layers that keep a recurrent state, where groups of layers with pages have their numbers.
STATE_GROUP = 255


def key(digest: bytes, group: int) -> bytes:
    """What the cache knows a group's entry by, a page or a copy of a state: the digest of the page that ends at the
    border. Equal contents have equal keys."""
    return digest if group == 0 else digest + bytes([group])


def longest_chain(groups: PageGroups, digests: list[bytes], start: int, end: int, has: Callable[[bytes], bool]) -> int:
    """How many pages full groups have one after another, where those before `start` are there; at most `end`."""
    for page in range(start, end):
        for group in groups.full:
            if not has(key(digests[page], group)):
                return page
    return max(start, end)


def usable_border(groups: PageGroups, digests: list[bytes], start: int, end: int, has: Callable[[bytes], bool]) -> int:
    """The longest border, in pages, from `start` to `end` at which window groups have their pages; those before `start`
    are there. Full groups have theirs up to `end`."""
    border = end
    while border > start:
        gap = next(_gaps(groups, digests, start, border, has), None)
        if gap is None:
            return border
        border = gap
    return start


def _gaps(
    groups: PageGroups, digests: list[bytes], start: int, border: int, has: Callable[[bytes], bool]
) -> Iterator[int]:
    """The pages that window groups need at a border and do not have, group by group, the last first."""
    for group in groups.windowed:
        for page in range(border - 1, max(start, groups.first(group, border)) - 1, -1):
            if not has(key(digests[page], group)):
                yield page


def is_worth_keeping(groups: PageGroups, request: Request, group: int, page: int) -> bool:
    """Whether somebody is likely to return to a border that needs this page of a window group."""
    behind, size = groups.behind[group], groups.page_size
    spacing = max(1, SPACING_TOKENS // size)
    if page >= (page // spacing + 1) * spacing - behind:
        return True
    tail = max(0, request.prompt_tokens - TAIL_TOKENS) // size - behind
    if tail <= page < request.prompt_tokens // size:
        return True
    return any(border - behind <= page < border for border in request.hold.turns)
