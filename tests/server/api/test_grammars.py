"""Grammars are checked outside the server, within a time and a size, and once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from longreach.api import grammars
from longreach.api.grammars import GrammarCompiler, Kind
from longreach.errors import InvalidRequestError

from tests.server.api.test_chat import schema_of

# An intersection of so many patterns takes for ever.
HOSTILE = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(40)]}


def compiled(kind: Kind, source: Any, max_bytes: int = 65536, seconds: int = 20) -> str:
    return asyncio.run(GrammarCompiler(max_bytes, seconds).compile(kind, source, "regex"))


def test_what_is_a_grammar_passes() -> None:
    assert schema_of(compiled("json_schema", {"type": "integer"})) == {"type": "integer"}
    assert "ab+" in compiled("regex", "ab+")
    assert compiled("lark", 'start: "x"') == 'start: "x"'


@pytest.mark.parametrize(
    ("kind", "source", "code"),
    [
        ("json_schema", {"type": "objekt"}, "invalid_grammar"),
        ("json_schema", {"$ref": "https://example.com/schema"}, "invalid_grammar"),
        ("regex", "(?=a)b", "invalid_grammar"),
        ("regex", "(a", "invalid_grammar"),
        ("lark", "start: nothing", "invalid_grammar"),
        ("lark", "x" * 70000, "grammar_too_large"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(kind: Kind, source: Any, code: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        compiled(kind, source)
    assert (refused.value.code, refused.value.param) == (code, "regex")
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def test_a_hostile_grammar_is_given_up_in_time_while_the_event_loop_turns() -> None:
    lags = []

    async def main() -> None:
        async def tick() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                lags.append(time.monotonic() - before)

        ticking = asyncio.create_task(tick())
        with pytest.raises(InvalidRequestError, match=r"takes more than 1 s or") as refused:
            await GrammarCompiler(65536, 1).compile("json_schema", HOSTILE, "response_format")
        assert refused.value.code == "grammar_too_complex"
        ticking.cancel()

    asyncio.run(main())
    assert len(lags) > 10


def test_a_grammar_is_tried_once_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    async def main() -> None:
        compiler = GrammarCompiler(65536, 20)

        async def fake(question: bytes, field: str) -> tuple[str, str]:
            tried.append(question)
            return question.decode(), "bad" if b"bad" in question else ""

        monkeypatch.setattr(compiler, "_try", fake)
        monkeypatch.setattr(grammars, "_REMEMBERED_BYTES", 100)
        for source in ("a", "a", "b", "a"):
            assert await compiler.compile("regex", source, "regex") == f'["regex","{source}"]'
        assert len(tried) == 2
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="bad"):
                await compiler.compile("regex", "bad", "regex")
        assert len(tried) == 3
        await compiler.compile("regex", "c" * 40, "regex")
        await compiler.compile("regex", "a", "regex")
        assert len(tried) == 5, "the oldest was not forgotten"

    asyncio.run(main())
