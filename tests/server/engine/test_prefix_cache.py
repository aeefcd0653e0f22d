"""Names of pages, and which idle page is given up first."""

from __future__ import annotations

import pytest
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher


def digests(tokens: list[int], *namespace: str, salt: str = "", size: int = 2) -> list[bytes]:
    names: list[bytes] = []
    PageHasher(size, *namespace).extend(names, tokens, salt)
    return names


def test_only_full_pages_have_names_and_a_name_depends_on_all_before_it() -> None:
    names = digests([1, 2, 3, 4, 5])
    assert len(names) == 2
    assert digests([1, 2, 3, 4]) == names
    assert digests([1, 2, 9, 4])[:1] == names[:1]
    assert digests([9, 2, 3, 4])[1] != names[1]
    assert digests([1, 2, 1, 2])[0] != digests([1, 2, 1, 2])[1]


@pytest.mark.parametrize(
    "other",
    [
        digests([1, 2], "model", salt="x"),
        digests([1, 2], "other"),
        digests([1, 2], "mode", "l"),
        digests([1, 2], "", "model"),
        digests([1, 2, 3, 4], "model", size=4),
        digests([1 + 2**8, 2], "model"),
    ],
)
def test_a_name_depends_on_everything_that_contents_and_tenants_depend_on(other: list[bytes]) -> None:
    assert other[0] != digests([1, 2], "model")[0]


def test_names_can_be_made_piece_by_piece() -> None:
    hasher, names, tokens = PageHasher(2, "m"), [], []
    for token in range(9):
        tokens.append(token)
        hasher.extend(names, tokens, "s")
    assert names == digests(tokens, "m", salt="s")


class _Pool:
    """A pool whose requests are lists of one-token pages that are named after a document and a position."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, 1)

    def run(self, document: str, length: int, keep_until: float | None = None) -> int:
        """Compute the first `length` tokens of a document; how many pages of it were there."""
        names = [f"{document}{i}".encode() for i in range(length)]
        shared = self.pool.match(names)
        assert self.pool.reserve(length - len(shared), shared)
        pages = shared + self.pool.allocate(length - len(shared))
        for page, name in zip(pages[len(shared) :], names[len(shared) :], strict=True):
            assert self.pool.cache.insert(page, name)
        self.pool.check([pages], [0])
        if keep_until is not None:
            self.pool.cache.retain(pages, keep_until)
        self.pool.free(pages, 0)
        self.pool.check([], [])
        return len(shared)

    def has(self, document: str, length: int) -> int:
        return len(self.pool.match([f"{document}{i}".encode() for i in range(length)]))


def test_the_oldest_goes_first_and_of_a_document_its_end() -> None:
    pool = _Pool(10)
    pool.run("a", 2)
    pool.run("b", 2)
    pool.run("c", 2)
    pool.run("d", 5)  # the 10 pages hold 11: one has to go
    assert [pool.has(name, 5) for name in "abcd"] == [1, 2, 2, 5]


def test_what_is_used_twice_outlives_what_is_used_once() -> None:
    pool = _Pool(10)
    pool.run("system", 2)
    assert pool.run("system", 2) == 2
    for name in "abcdefgh":
        pool.run(name, 2)
    assert pool.has("system", 2) == 2


def test_one_giant_prompt_does_not_push_out_everybody_else() -> None:
    pool = _Pool(16)
    pool.run("mine", 4)
    pool.run("giant", 12)
    assert pool.has("mine", 4) == 4
    pool.run("next", 8)
    # the giant's pages beyond a quarter of the cache made room, its end first; nobody else's did
    assert (pool.has("mine", 4), pool.has("giant", 12)) == (4, 4)


def test_what_is_protected_never_fills_more_than_half() -> None:
    pool = _Pool(10)
    for _ in range(2):
        for name in "abcd":
            pool.run(name, 2)
    pool.run("new", 10)  # takes every page all the same: what is promised is never refused for the cache's sake
    assert pool.has("new", 10) == 10


def test_a_cancelled_request_keeps_its_pages_for_a_while_and_then_loses_them_first() -> None:
    pool = _Pool(12)
    pool.run("gone", 4, keep_until=60.0)
    for name in "abcd":
        pool.run(name, 3)
    assert pool.has("gone", 4) == 4
    pool.pool.cache.expire(59.9)
    pool.run("e", 3)
    assert pool.has("gone", 4) == 4
    pool.pool.cache.expire(60.0)
    pool.run("f", 3)
    assert pool.has("gone", 4) == 1
    assert pool.has("e", 3) == 3


def test_a_retry_ends_the_retention() -> None:
    pool = _Pool(12)
    pool.run("gone", 4, keep_until=60.0)
    assert pool.run("gone", 4) == 4
    pool.pool.cache.expire(60.0)
    assert pool.has("gone", 4) == 4


def test_a_page_with_contents_that_another_has_is_not_named() -> None:
    pool = PagePool(4, 1)
    assert pool.reserve(2, [])
    one, two = pool.allocate(2)
    assert pool.cache.insert(one, b"x")
    assert not pool.cache.insert(two, b"x")
    pool.free([one, two], 0)
    pool.check([], [])
    assert (pool.num_free, pool.cache.num_idle) == (3, 1)


def test_promises_count_idle_pages_that_a_request_shares() -> None:
    pool = _Pool(10)
    pool.run("a", 6)
    shared = pool.pool.match([f"a{i}".encode() for i in range(6)])
    assert not pool.pool.reserve(5, shared)
    assert pool.pool.num_available == 10
    assert pool.pool.reserve(4, shared)
    assert pool.pool.num_available == 0
    pool.pool.check([shared], [4])
