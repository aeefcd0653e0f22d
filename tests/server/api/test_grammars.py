"""Grammars are checked outside the server, within a time and a size, and once."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from longreach.api.service import grammar_compiler as grammars
from longreach.api.service.grammar_check import OUT_OF_MEMORY, Kind
from longreach.api.service.grammar_compiler import GrammarCompiler
from longreach.errors import InvalidRequestError, OverloadedError, UnavailableError
from longreach.util import child_answer

from tests.server.api.test_chat import schema_of

# An intersection of so many patterns takes for ever.
HOSTILE = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(40)]}


def compiled(kind: Kind, source: Any, max_bytes: int = 65536, seconds: int = 20) -> str:
    return asyncio.run(GrammarCompiler(max_bytes, seconds).compile(kind, source, "regex", "me"))


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
        ("regex", r"[^\s\S]", "invalid_grammar"),
        ("json_schema", {"$ref": "#"}, "invalid_grammar"),
        ("lark", "x" * 70000, "grammar_too_large"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(kind: Kind, source: Any, code: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        compiled(kind, source)
    assert (refused.value.code, refused.value.param) == (code, "regex")
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def test_a_grammar_that_allows_no_text_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="`regex`: there is no text that it allows"):
        compiled("regex", r"[^\s\S]")


def test_a_hostile_grammar_is_given_up_in_time_while_the_event_loop_turns_and_costs_nothing_again() -> None:
    lags, processes = [], []

    async def main() -> None:
        async def tick() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                lags.append(time.monotonic() - before)

        compiler = GrammarCompiler(65536, 1)
        trying = compiler._try

        async def counted(question: bytes) -> grammars._Verdict:
            processes.append(question)
            return await trying(question)

        compiler._try = counted  # type: ignore[method-assign]
        ticking = asyncio.create_task(tick())
        for _ in range(3):
            with pytest.raises(InvalidRequestError, match=r"takes more than 1 s or") as refused:
                await compiler.compile("json_schema", HOSTILE, "response_format", "me")
            assert (refused.value.code, refused.value.param) == ("grammar_too_complex", "response_format")
        ticking.cancel()

    asyncio.run(main())
    assert len(lags) > 10
    assert len(processes) == 1


def test_a_grammar_is_tried_once_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    async def main() -> None:
        compiler = GrammarCompiler(65536, 20)

        async def fake(question: bytes) -> grammars._Verdict:
            tried.append(question)
            return grammars._Verdict(question.decode(), "bad" if b"bad" in question else "")

        monkeypatch.setattr(compiler, "_try", fake)
        monkeypatch.setattr(grammars, "_REMEMBERED_BYTES", 3 * (grammars._ENTRY_BYTES + 20))
        for source in ("a", "a", "b", "a"):
            assert await compiler.compile("regex", source, "regex", "me") == f'["regex","{source}"]'
        assert len(tried) == 2
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="bad"):
                await compiler.compile("regex", "bad", "regex", "me")
        assert len(tried) == 3
        await compiler.compile("regex", "a", "regex", "me")
        assert len(tried) == 3
        await compiler.compile("regex", "c" * 40, "regex", "me")
        await compiler.compile("regex", "a", "regex", "me")
        assert len(tried) == 4, "the last used was forgotten"
        await compiler.compile("regex", "b", "regex", "me")
        assert len(tried) == 5, "the oldest was not forgotten"

    asyncio.run(main())


class _Child:
    """A process that compiles until it is killed, or ends with `status` at once."""

    def __init__(self, status: int | None = None) -> None:
        self.returncode = status
        self._ended = asyncio.Event()

    async def communicate(self, question: bytes) -> tuple[bytes, None]:
        if self.returncode is None:
            await self._ended.wait()
        return b"", None

    def kill(self) -> None:
        self.returncode = -9
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait() if self.returncode is None else None
        assert self.returncode is not None
        return self.returncode


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a test's bound ends it
        await asyncio.sleep(0)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[_Child]:
    """The processes that were started, none of which ends by itself."""
    started: list[_Child] = []

    async def start(*_: object, **__: object) -> _Child:
        started.append(_Child())
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    return started


def test_a_process_is_killed_with_the_last_who_waits_for_it(children: list[_Child]) -> None:
    async def main() -> None:
        compiler = GrammarCompiler(65536, 20)
        two = [asyncio.create_task(compiler.compile("regex", "a", "regex", caller)) for caller in ("alice", "bob")]
        await until(lambda: bool(children))
        two[0].cancel()
        await asyncio.wait(two[:1])
        await asyncio.sleep(0)
        assert children[0].returncode is None
        assert not two[1].done()
        two[1].cancel()
        await asyncio.wait(two)
        await until(lambda: children[0].returncode is not None)
        other = asyncio.create_task(compiler.compile("regex", "b", "regex", "alice"))
        await until(lambda: len(children) == 2)
        await compiler.stop()
        assert children[1].returncode == -9
        await asyncio.wait([other])

    asyncio.run(asyncio.wait_for(main(), 10))


def test_too_many_that_wait_are_refused_and_known_ones_are_not(children: list[_Child]) -> None:
    async def main() -> None:
        compiler = GrammarCompiler(65536, 7)
        compiler._known[hashlib.sha256(b'["regex","known"]').digest()] = grammars._Verdict("grammar")
        tasks = []
        for number in range(grammars._MOST_OF_ONE + 1):  # one of them has begun
            tasks.append(asyncio.create_task(compiler.compile("regex", f"a{number}", "regex", "alice")))
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as refused:
            await compiler.compile("regex", "b", "regex", "alice")
        assert (refused.value.code, refused.value.headers["Retry-After"]) == ("grammar_queue_full", "7")
        assert await compiler.compile("regex", "known", "regex", "alice") == "grammar"
        bob = asyncio.create_task(compiler.compile("regex", "b", "regex", "bob"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(children) == 2, "another caller's is not begun"
        for task in (*tasks, bob):
            task.cancel()
        await asyncio.wait([*tasks, bob])

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_process_that_had_not_its_time_says_nothing_of_the_grammar(
    children: list[_Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(grammars, "_PATIENCE", 0.001)
        compiler = GrammarCompiler(65536, 1)
        for number in (1, 2):
            with pytest.raises(OverloadedError) as refused:
                await compiler.compile("regex", "a", "regex", "me")
            assert refused.value.code == "grammar_timeout"
            assert len(children) == number
            assert children[-1].returncode == -9

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_process_that_could_not_run_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(status: int) -> None:
        async def start(*_: object, **__: object) -> _Child:
            return _Child(status)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        await GrammarCompiler(65536, 1).compile("regex", "a", "regex", "me")

    with pytest.raises(RuntimeError, match="status 1"):
        asyncio.run(main(1))
    for status in (-24, -6, OUT_OF_MEMORY):
        with pytest.raises(InvalidRequestError, match="takes more than 1 s or 1024 MiB"):
            asyncio.run(main(status))


def test_a_process_that_cannot_be_started_is_told_and_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        compiler = GrammarCompiler(65536, 20)
        with monkeypatch.context() as patched:
            patched.setattr(child_answer, "require_descriptors", no_descriptors)
            with pytest.raises(UnavailableError) as refused:
                await compiler.compile("regex", "ab+", "regex", "me")
        assert (refused.value.status, refused.value.code) == (503, "grammar_not_compiled")
        assert 1 <= int(refused.value.headers["Retry-After"]) <= 60
        assert "ab+" in await compiler.compile("regex", "ab+", "regex", "me")

    asyncio.run(main())


def test_a_process_that_was_asked_to_end_says_nothing_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a service manager that ends all processes of a group. SIGHUP would do nothing under nohup."""
    monkeypatch.setattr(grammars, "module_command", lambda *_: ("sh", "-c", "kill -TERM $$"))
    compiler = GrammarCompiler(65536, 20)
    with pytest.raises(RuntimeError, match="ended with status -15"):
        asyncio.run(compiler.compile("regex", "ab+", "regex", "me"))
    assert not compiler._known
