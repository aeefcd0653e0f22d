"""The beginnings of documents' prompts are kept within a bound, those that were used last."""

from __future__ import annotations

from array import array

from longreach.documents.beginnings import Beginnings
from longreach.text.beginning import Beginning, digest_of


def beginning(tokens: int) -> Beginning:
    return Beginning(0, digest_of(""), True, True, 0, array("i", range(tokens)))


def test_the_one_that_was_used_longest_ago_makes_room() -> None:
    kept = Beginnings(most_tokens=10)
    for name in ("a", "b", "c"):
        kept.keep(name, beginning(3))
    assert kept.get("a") is not None
    kept.keep("d", beginning(4))
    assert [name for name in "abcd" if kept.get(name)] == ["a", "c", "d"]
    assert kept.num_tokens == 10
    kept.forget("a")
    kept.forget("a")
    kept.keep("c", beginning(2))
    assert kept.num_tokens == 6


def test_what_is_too_long_is_not_kept_and_pushes_nothing_out() -> None:
    kept = Beginnings(most_tokens=10)
    kept.keep("a", beginning(3))
    kept.keep("b", beginning(11))
    assert kept.get("a") is not None
    assert kept.get("b") is None
    assert kept.num_tokens == 3
