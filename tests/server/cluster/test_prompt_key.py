"""Digests of prompts: equal as far as prompts are, whatever form they have."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from longreach.cluster.prompt_key import BLOCK_BYTES, PromptKey, marks, prompt_key

DOCUMENT = "".join(f"Line {number} says {number * 7919 % 1000}. " for number in range(400))


def key(salt: bytes = b"", **fields: Any) -> PromptKey:
    return prompt_key(json.dumps({"model": "m", **fields}).encode(), salt)


def shared(a: PromptKey, b: PromptKey) -> int:
    return next((i for i, (x, y) in enumerate(zip(a.chain, b.chain, strict=False)) if x != y), len(a.chain))


FORMS = {
    "prompt": lambda question: {"prompt": DOCUMENT + question},
    "tokens": lambda question: {"prompt": [*range(3000), *question.encode()]},
    "messages": lambda question: {"messages": [{"role": "user", "content": DOCUMENT + question}]},
    "turns": lambda question: {
        "messages": [{"role": "user", "content": DOCUMENT}, {"role": "user", "content": question}]
    },
    "system": lambda question: {"system": DOCUMENT, "messages": [{"role": "user", "content": question}]},
    "input": lambda question: {"input": DOCUMENT + question, "instructions": "Be short."},
}


@pytest.mark.parametrize("form", FORMS)
def test_questions_about_one_document_share_all_of_it(form: str) -> None:
    one, two = (key(**FORMS[form](question), seed=seed) for seed, question in enumerate(("Who?", "Where was it?")))
    assert one != two
    assert shared(one, two) >= len(one.chain) - 1 > 7
    assert one.anchor == two.anchor


@pytest.mark.parametrize(
    "other",
    [{"salt": b"Bearer b"}, {"cache_salt": "b"}, {"attention": "window:4096"}, {"instructions": "b"}, {"tools": [1]}],
)
def test_what_keeps_pages_apart_keeps_chains_apart(other: dict[str, Any]) -> None:
    one, two = key(prompt=DOCUMENT), key(**{"prompt": DOCUMENT, **other})
    assert shared(one, two) == 0
    assert one.anchor != two.anchor


def test_a_short_prompt_has_an_anchor_but_no_blocks() -> None:
    one, two = key(prompt="Once"), key(prompt="Twice")
    assert one.chain == two.chain == ()
    assert one.anchor != two.anchor


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"{}", b'{"prompt": ""}', b'{"prompt": null}'])
def test_a_body_without_a_prompt_has_an_empty_key(body: bytes) -> None:
    assert prompt_key(body, b"") == PromptKey()


def test_tokens_are_estimated_from_what_is_behind_the_shared_blocks() -> None:
    whole = key(prompt=DOCUMENT)
    assert whole.tokens == whole.text_bytes // 4
    assert whole.tokens_beyond(2) == (whole.text_bytes - 2 * BLOCK_BYTES) // 4
    assert whole.tokens_beyond(10**6) == 0


def test_marks_are_few_and_know_a_length_to_a_fifth() -> None:
    found = marks(65536)
    assert found[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert len(found) < 60
    assert all(after <= max(before + 1, before * 1.25) for before, after in itertools.pairwise(found))
    assert len(key(prompt="a" * 100_000).chain) == len(marks(100_000 // BLOCK_BYTES))
