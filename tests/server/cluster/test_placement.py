"""Which replica gets a prompt: the owner of its document, unless waiting there costs more than reading it again."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from longreach.cluster.placement import OPEN_REQUEST_TOKENS, OWNER_TOKENS, Load, Placement
from longreach.cluster.prompt_key import BLOCK_BYTES, PromptKey, prompt_key

REPLICAS = ("a", "b", "c")
SHARED = 33  # the last mark in a document of 40 blocks


def document(number: int, blocks: int = 40, question: int = 0) -> PromptKey:
    """A document of so many blocks, and a question behind it, which is behind the last mark but one."""
    text = random.Random(number).randbytes(blocks * BLOCK_BYTES // 2).hex() + "?" * question
    return prompt_key(json.dumps({"prompt": text}).encode(), b"")


def idle() -> dict[str, Load]:
    return {name: Load() for name in REPLICAS}


def test_a_documents_next_question_goes_to_its_owner() -> None:
    placement = Placement()
    draw = random.Random(7)
    owners = {}
    for number in range(60):
        # Whoever was least busy then; loads are others by the time of the next question.
        owners[number] = draw.choice(REPLICAS)
        placement.remember(owners[number], document(number).chain)
    for number, owner in owners.items():
        assert placement.shared_blocks(document(number, question=700), owner) == SHARED
        assert placement.rank(document(number, question=700), idle())[0] == owner


@pytest.mark.parametrize(("blocks", "patience"), [(40, OWNER_TOKENS), (200, 188 * BLOCK_BYTES // 4)])
def test_an_owner_is_passed_over_when_waiting_costs_more_than_reading_again(blocks: int, patience: int) -> None:
    placement = Placement()
    placement.remember("a", document(1, blocks).chain)
    key = document(1, blocks, question=700)
    for load in (Load(unread_tokens=patience - 512), Load(open_requests=patience // OPEN_REQUEST_TOKENS - 2)):
        assert placement.rank(key, idle() | {"a": load})[0] == "a"
    for load in (Load(unread_tokens=patience + 512), Load(open_requests=patience // OPEN_REQUEST_TOKENS + 2)):
        assert placement.rank(key, idle() | {"a": load})[0] != "a"


def test_a_beginning_that_many_share_binds_nobody() -> None:
    placement = Placement()
    placement.remember("a", document(1).chain[:4])
    assert placement.rank(document(1), idle() | {"a": Load(unread_tokens=4 * BLOCK_BYTES // 4 - 1)})[0] == "a"
    assert placement.rank(document(1), idle() | {"a": Load(unread_tokens=4 * BLOCK_BYTES // 4 + 512)})[0] != "a"


def test_a_prompt_that_nobody_had_goes_to_the_least_busy_and_else_where_any_router_sends_it() -> None:
    loads = {"a": Load(9000), "b": Load(2000), "c": Load(5000)}
    assert Placement().rank(document(1), loads) == ["b", "c", "a"]
    firsts = [Placement().rank(document(number), idle())[0] for number in range(300)]
    assert firsts == [Placement().rank(document(number), dict(reversed(idle().items())))[0] for number in range(300)]
    assert min(Counter(firsts)[name] for name in REPLICAS) > 60, "prompts are not spread"


def test_a_replica_more_moves_only_what_becomes_its_own() -> None:
    for number in range(100):
        before = Placement().rank(document(number), idle())[0]
        after = Placement().rank(document(number), idle() | {"d": Load()})[0]
        assert after in (before, "d")


def test_a_replica_that_takes_nothing_is_the_last_choice() -> None:
    placement = Placement()
    placement.remember("a", document(1).chain)
    assert placement.rank(document(1), idle() | {"a": Load(ready=False), "b": Load(10**6)})[-1] == "a"


def test_memory_is_bounded_and_old_prompts_go_first() -> None:
    placement = Placement(memory_digests=30)
    for number in range(3):
        placement.remember("a", document(number).chain)
    assert sum(map(len, placement._seen.values())) == 30
    shared = [placement.shared_blocks(document(number), "a") for number in range(3)]
    assert shared == [0, SHARED, SHARED]


def test_replicas_that_are_gone_are_forgotten() -> None:
    placement = Placement()
    placement.remember("a", document(1).chain)
    placement.remember("b", document(1).chain)
    placement.keep_only(["b"])
    assert placement.shared_blocks(document(1), "a") == 0
    assert placement.shared_blocks(document(1), "b") == SHARED
