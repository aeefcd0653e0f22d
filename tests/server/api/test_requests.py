"""Request ids, the request log, health, and long bodies."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

import orjson
import pytest
from longreach.api.http.body import read_json
from longreach.api.http.request_log import RequestRecord
from longreach.api.schema.requests.completions import CompletionRequest
from longreach.util.work_pool import WorkPool
from starlette.requests import Request

from tests.server.api.conftest import MODEL, LiveServer, eventually


def request_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "longreach.requests"]


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def test_a_request_id_is_echoed(server: LiveServer) -> None:
    for path in ("/health", "/nowhere", "/v1/models"):
        assert (
            server.http.get(path, headers={"X-Request-Id": "trace:1/a-b_c.d"}).headers["x-request-id"]
            == "trace:1/a-b_c.d"
        )


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "<script>", "é", "a\tb"])
def test_an_unfit_request_id_is_replaced(server: LiveServer, given: str | None) -> None:
    headers = {} if given is None else {b"x-request-id": given.encode("utf-8")}
    first, second = (server.http.get("/version", headers=headers).headers["x-request-id"] for _ in range(2))
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second


def test_one_line_a_request_without_the_prompt(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    secret = "The owl keeps a secret " * 200
    for stream in (False, True):
        caplog.clear()
        headers = {"x-request-id": f"r{stream}"}
        body = {"model": MODEL, "prompt": secret, "max_tokens": 5, "stream": stream}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        eventually(lambda: len(request_lines(caplog)) == 1)
        [line] = request_lines(caplog)
        n = len(server.engine.requests[-1].prompt)
        assert re.fullmatch(
            rf"id=r{stream} POST /v1/completions status=200 completion=cmpl-\w+ prompt={n} cached=0 output=5 "
            r"ttft=\d+\.\d{3}s total=\d+\.\d{3}s finish=length",
            line,
        )
        assert all("secret" not in record.getMessage() for record in caplog.records)


def test_refusals_and_departures_are_logged_too(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    server.complete(max_tokens=-2)
    eventually(lambda: any("status=400" in line and "finish=invalid_value" in line for line in request_lines(caplog)))
    server.engine.hold_decode_after = 2
    server.connect(orjson.dumps({"model": MODEL, "prompt": [5] * 9, "stream": True})).close()
    eventually(lambda: any("finish=disconnected" in line for line in request_lines(caplog)))


def test_a_departure_is_logged_as_one_although_an_answer_had_ended(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.hold_decode_after = 3
    body = orjson.dumps({"model": MODEL, "prompt": [[5] * 2, [5] * 9], "stream": True})
    with server.connect(body) as sock:
        received = b""
        while b'"finish_reason":"stop"' not in received:
            received += sock.recv(65536)
    eventually(lambda: len(request_lines(caplog)) == 1)
    assert request_lines(caplog)[0].endswith("finish=disconnected")


def test_the_first_reason_for_an_end_stays() -> None:
    record = RequestRecord("id", "POST", "/")
    record.finished(None)
    record.finished("stop")
    record.disconnected()
    assert record.finish == "stop"


def test_a_keep_alive_says_that_kernels_are_compiled_while_an_answer_waits_for_them() -> None:
    record = RequestRecord("id", "POST", "/")
    record.answering("cmpl-1", 100)
    record.compiles("a", compiling=True)
    assert record.keep_alive() == b" \n", "nobody reads comments"
    record.show_progress()
    assert record.keep_alive() == b": compiling\n"
    record.compiles("a", compiling=False)
    assert record.keep_alive() == b": prefill 0/100\n"


def test_a_path_can_neither_forge_nor_flood_the_log(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    server.http.get("/%0aid=forged" + "x" * 20000)
    eventually(lambda: bool(request_lines(caplog)))
    [line] = request_lines(caplog)
    assert "\n" not in line
    assert len(line) < 2048


def test_health_answers_while_the_engine_is_busy_and_is_not_in_the_log(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.hold_prefill = True
    with server.connect(orjson.dumps({"model": MODEL, "prompt": [5] * 999})):
        eventually(lambda: len(server.engine.running) == 1)
        response = server.http.get("/health")
        assert (response.status_code, response.json()) == (200, {"status": "ready"})
        assert len(server.engine.requests) == 1
    eventually(lambda: any("GET /health" in line for line in request_lines(caplog)))
    levels = {r.levelno for r in caplog.records if r.name == "longreach.requests" and "GET /health" in r.getMessage()}
    assert levels == {logging.DEBUG}


def test_before_the_model_is_loaded_nothing_is_taken(make_server: Callable[..., LiveServer]) -> None:
    with make_server(ready=False) as server:
        assert server.http.get("/health").json() == {"status": "loading"}
        assert server.complete().status_code == 503
        assert not server.engine.requests


def test_a_long_body_is_read_while_the_event_loop_turns() -> None:
    body = orjson.dumps({"model": MODEL, "prompt": list(range(1_000_000))})
    ticks = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def tick() -> None:
        while True:
            ticks.append(0)
            await asyncio.sleep(0)

    async def main() -> None:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        ticking = asyncio.create_task(tick())
        pool = WorkPool("reading", 1)
        parsed, _ = await read_json(Request(scope, receive), CompletionRequest, len(body), 2_000_000, pool)
        ticking.cancel()
        assert len(parsed.prompt[0]) == 1_000_000

    asyncio.run(main())
    assert len(ticks) > 3
