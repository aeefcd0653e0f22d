"""One caller cannot take the house: what one sends leaves room for others, and what nobody waits for ends."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from longreach.api.generation import plan_answers as asking
from longreach.api.http.request_log import RequestRecord, network_of
from longreach.engine.admission import Admission
from longreach.engine.errors import RequestFailedError

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.told import error_of

LONG = [5, 6] * 50_000


def hostile(number: int = 0) -> dict[str, Any]:
    """Fields of a request whose grammar takes for ever."""
    schema = {"allOf": [{"type": "string", "pattern": f".*{i + 100 * number}.*"} for i in range(40)]}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def default_ledger(server: LiveServer) -> Admission:
    """The bounds of a server with its default options, whose KV cache holds 256K tokens."""
    server.engine.admission = Admission(256, 1 << 20, 8192)
    return server.engine.admission


@pytest.mark.parametrize("fields", [{"n": 16}, {"n": 2, "best_of": 16}, {"prompt": [LONG] * 16}])
def test_copies_of_a_long_prompt_leave_room_for_others(make_server: Callable[..., LiveServer], fields: Any) -> None:
    with make_server(max_model_len=131_072) as server:
        ledger, engine = default_ledger(server), server.engine
        engine.hold_prefill = True
        body = {"model": MODEL, "prompt": LONG, "max_tokens": 1, **fields}
        with server.connect(json.dumps(body).encode()):
            eventually(lambda: len(engine.running) == 16)
            assert ledger.waiting_tokens + ledger.unread_tokens <= 2 * len(LONG)
            for number in range(10):  # as long as that, too
                other = {"model": MODEL, "prompt": [7 + number] * 100_000, "max_tokens": 1}
                with server.http.stream("POST", "/v1/completions", json={**other, "stream": True}) as response:
                    assert response.status_code == 200
        eventually(lambda: not engine.places and not engine.running)
        assert (ledger.waiting_requests, ledger.waiting_tokens, ledger.unread_tokens) == (0, 0, 0)
        engine.hold_prefill = False
        assert server.complete(max_tokens=1).status_code == 200


def test_a_key_that_fills_the_queue_does_not_keep_another_out(make_server: Callable[..., LiveServer]) -> None:
    with make_server(api_key="alice:first-key-0001,bob:other-key-0002") as server:
        server.engine.admission = Admission(8, 1 << 20, 64)
        server.engine.hold_prefill = True
        body = {"model": MODEL, "prompt": [5], "max_tokens": 1, "stream": True}
        alice, bob = ({"authorization": f"Bearer {key}"} for key in ("first-key-0001", "other-key-0002"))
        with server.http.stream("POST", "/v1/completions", json={**body, "n": 8}, headers=alice):
            refused = server.http.post("/v1/completions", json=body, headers=alice)
            error_of(refused, 429, "queue_full")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            with server.http.stream("POST", "/v1/completions", json=body, headers=bob) as response:
                assert response.status_code == 200
        eventually(lambda: not server.engine.places)


def test_prompts_that_are_scored_are_read_each(server: LiveServer) -> None:
    entered = []
    ledger = server.engine.admission
    ledger.enter = lambda places, **more: entered.append(places) or Admission.enter(ledger, places, **more)  # type: ignore[method-assign]
    prompts = [[5, 6, 7], [5, 6, 8], [5, 6, 7], [5, 6]]
    assert server.complete(prompt=prompts, n=2, max_tokens=1).status_code == 200
    assert server.complete(prompt=prompts, n=2, max_tokens=1, echo=True, logprobs=0).status_code == 200
    plain, scored = ([*places.values()] for places in entered)
    ids = [*entered[0]]
    assert [place.copy_of for place in plain] == [None, ids[0], None, ids[2], ids[0], ids[0], None, ids[6]]
    assert [place.copy_of is None for place in scored] == [True, False] * 4
    assert [place.prompt_tokens for place in plain] == [3, 3, 3, 3, 3, 3, 2, 2]


def test_prompts_that_can_never_wait_together_are_refused_for_good(make_server: Callable[..., LiveServer]) -> None:
    with make_server(max_queued_tokens=100) as server:
        error = error_of(server.complete(prompt=[[5] * 60, [6] * 60]), 400, "invalid_value")
        assert error["param"] == "prompt"
        assert "2 prompts with 120 tokens" in error["message"]
        assert "100 tokens wait (--max-queued-tokens)" in error["message"]
        assert server.complete(prompt=[5] * 500, n=3, max_tokens=1).status_code == 200, "one is always taken"
        assert server.complete(prompt=[[5] * 50, [6] * 50], max_tokens=1).status_code == 200
    with make_server(max_queued_tokens=100, prefix_cache=False) as server:
        error_of(server.complete(prompt=[5] * 60, n=2), 400, "invalid_value")


def test_prompts_of_one_length_are_told_apart_quickly() -> None:
    prompts = [[5] * 100_000 + [number % 40] for number in range(64)]
    began = time.monotonic()
    assert asking._readers(prompts, apart=False) == [*range(40), *range(24)]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("client", "network"),
    [
        (("10.1.2.3", 5), "10.1.2.3"),
        (("::ffff:10.1.2.3", 5), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (("somewhere", 0), "somewhere"),
        (None, ""),
    ],
)
def test_a_caller_is_an_address_or_a_network_of_one_machine(client: tuple[str, int] | None, network: str) -> None:
    assert network_of(client) == network
    assert RequestRecord("id", "GET", "/", network).caller == network


def test_the_engine_is_told_whose_a_request_is(make_server: Callable[..., LiveServer]) -> None:
    with make_server() as server:
        assert server.complete().status_code == 200
        assert server.engine.callers == ["127.0.0.1"]
    with make_server(api_key="alice:first-key-0001") as server:
        server.http.headers["authorization"] = "Bearer first-key-0001"
        assert server.complete().status_code == 200
        assert server.engine.callers == [request.caller for request in server.engine.requests] == ["alice"]


def test_priority_needs_the_servers_leave(make_server: Callable[..., LiveServer]) -> None:
    with make_server() as server:
        for priority in (-100, -1, 1):
            error = error_of(server.complete(priority=priority), 400, "unsupported_value")
            assert error["param"] == "priority"
            assert "--allow-priority" in error["message"]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "priority": 1}
        assert server.http.post("/v1/chat/completions", json=chat).status_code == 400
        for priority in (0, None):
            assert server.complete(priority=priority).status_code == 200
    with make_server(allow_priority=True) as server:
        assert server.complete(priority=-100).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_in_the_engine_is_named(server: LiveServer, stream: bool) -> None:
    server.engine.failure = RequestFailedError("the grammar cannot be followed any further: too complex", "grammar")
    response = server.complete(regex="a+", stream=stream)
    if stream:
        error = json.loads(response.text.split("data: ")[-2])["error"]
    else:
        error = error_of(response, 400, "invalid_grammar")
    assert error["param"] == "regex"
    assert error["code"] == "invalid_grammar"
    assert error["message"] == "`regex`: the grammar cannot be followed any further: too complex."


class _Compiling:
    """How many of a server's grammar processes are running."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[Any] = []
        create = asyncio.create_subprocess_exec

        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.processes.append(await create(*args, **kwargs))
            return self.processes[-1]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)

    @property
    def running(self) -> int:
        return sum(process.returncode is None for process in self.processes)


def test_grammars_of_callers_who_leave_are_not_compiled(
    make_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    compiling = _Compiling(monkeypatch)
    with make_server(max_grammar_seconds=60) as server:
        bodies = [json.dumps({"model": MODEL, "prompt": "x", **hostile(number)}).encode() for number in range(30)]
        sockets = [server.connect(body) for body in bodies]
        eventually(lambda: len(server.service.grammars._turns._pieces) == 30)
        for sock in sockets:
            sock.close()
        eventually(lambda: not server.service.grammars._turns._pieces)
        eventually(lambda: not compiling.running)
        assert len(compiling.processes) <= 2, "somebody worked for those who had left"
        eventually(lambda: sum("finish=disconnected" in record.getMessage() for record in caplog.records) == 30)
        assert server.complete(regex="[ab]", max_tokens=1).status_code == 200


def test_the_end_of_the_server_ends_what_compiles(
    make_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = _Compiling(monkeypatch)
    with make_server(max_grammar_seconds=60) as server:
        tasks = []
        with server.connect(json.dumps({"model": MODEL, "prompt": "x", **hostile()}).encode()) as sock:
            eventually(lambda: compiling.running == 1)
            server.call(lambda: tasks.append(asyncio.ensure_future(server.service.drain(0, asyncio.Event()))))
            answer = sock.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 503")
            while b"shutting_down" not in answer:
                more = sock.recv(10_000)
                assert more, answer
                answer += more
        eventually(lambda: not compiling.running)
