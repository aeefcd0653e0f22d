"""Looks: what they say is what a request then gets, and they change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.looks import Look, Looked
from longreach.engine.messages import Failed, Generate
from longreach.engine.updates import Update
from longreach.policies.values import DENSE

from tests.server.engine.kinds import KINDS, PAGE, Counting, engine_of


def look(engine: Engine, prompt: Sequence[int], page: int = PAGE, salt: str = "", **more) -> Looked:
    digests: list[bytes] = []
    PageHasher(page, "m").extend(digests, prompt, salt, more.get("attention", DENSE).key)
    return engine.look(Look(look_id=3, prompt_tokens=len(prompt), digests=b"".join(digests), **more))


def answer(engine: Engine, name: str, prompt: list[int], max_tokens: int = 4) -> Update:
    """The last update of a request that is alone."""
    assert engine.submit(Generate(request_id=name, prompt=prompt, max_tokens=max_tokens)) is None
    last: Update | None = None
    while engine.has_work:
        for news in engine.step():
            assert not isinstance(news, Failed)
            last = news.updates[-1]
    assert last is not None
    return last


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_look_finds_is_what_the_request_gets(kind: str) -> None:
    engine = engine_of(kind, Counting())
    document = [5 + i % 7 for i in range(40 * PAGE)]
    assert look(engine, document).gpu == 0
    answer(engine, "first", [*document, 1, 2, 3])
    for prompt in ([*document, *[4] * 300], document, document[: 10 * PAGE], [9, *document]):
        scheduler = engine.scheduler
        before = scheduler.allocator.usage, scheduler.allocator.state_usage
        found = look(engine, prompt)
        assert look(engine, prompt) == found, "a look has changed something"
        assert (scheduler.allocator.usage, scheduler.allocator.state_usage) == before
        assert (found.look_id, found.total, found.host, found.disk) == (3, len(prompt), 0, 0)
        assert found.gpu == answer(engine, f"then {len(prompt)} {prompt[0]}", prompt).cached
    assert look(engine, document, salt="another").gpu == 0


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    engine = engine_of("full", Counting())
    found = look(engine, [1] * 1000)
    assert (found.seconds_alone, found.seconds_whole, found.seconds_now) == (None, None, None)
    answer(engine, "first", [1] * 1000)
    found = look(engine, [1] * 1000)
    assert min(found.seconds_alone or 0, found.seconds_whole or 0, found.seconds_now or 0) > 0
