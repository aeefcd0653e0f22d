"""The store of responses fails, is flooded, or is taken from under the server: requests are answered all the same."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from longreach.api.service.response_store import ResponseStore
from longreach.engine.admission import Admission

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_chat import TEMPLATE
from tests.server.api.told import error_of

KEYS = "ann:secret-of-ann,bob:secret-of-bob"
ANN, BOB = ({"Authorization": f"Bearer secret-of-{name}"} for name in ("ann", "bob"))


@pytest.fixture
def filed(make_server: Callable[..., LiveServer], tmp_path: Path) -> Iterator[LiveServer]:
    """A server whose store is a file."""
    with make_server(template=TEMPLATE, responses_store=str(tmp_path / "responses.db")) as live:
        live.engine.answer = lambda request: [9]
        yield live


@pytest.fixture
def keyed(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    """A server with two keys."""
    with make_server(template=TEMPLATE, api_key=KEYS, responses_store_bytes=2**20, write_timeout=0.3) as live:
        live.engine.answer = lambda request: [9]
        yield live


def ask(server: LiveServer, headers: dict[str, str] | None = None, **fields: Any) -> httpx2.Response:
    return server.http.post("/v1/responses", json={"model": MODEL, "input": "Hello", **fields}, headers=headers)


def last_object(answer: httpx2.Response) -> dict[str, Any]:
    """The response's object, whole or of the last event."""
    last = answer.text.removesuffix("data: [DONE]\n\n").rpartition("data: ")
    return json.loads(last[2])["response"] if last[1] else answer.json()


def in_store(server: LiveServer, work: Callable[[ResponseStore], object]) -> Any:
    """What `work` gives in the store's own thread."""
    return asyncio.run_coroutine_threadsafe(server.service.kept._do(work, ""), server.loop).result(20)


def delete_files(server: LiveServer) -> None:
    for file in Path(server.service.settings.responses_store).parent.glob("responses.db*"):
        file.unlink()


def sql(statement: str) -> Callable[[LiveServer], None]:
    return lambda server: in_store(server, lambda store: store._db.execute(statement).fetchall())


# What is done to the store, and whether a response that was kept before can be read.
FAILURES: dict[str, tuple[Callable[[LiveServer], None], bool]] = {
    "read-only": (sql("PRAGMA query_only = ON"), True),
    "disk full": (sql("PRAGMA max_page_count = 1"), True),
    "deleted": (delete_files, True),
    "no table": (sql("DROP TABLE items"), False),
    "damaged responses": (sql("UPDATE responses SET body = x'00ff'"), False),
    "damaged items": (sql("UPDATE items SET body = x'00ff'"), False),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_store_that_fails_costs_no_answer_and_says_so(filed: LiveServer, failure: str) -> None:
    fail, readable = FAILURES[failure]
    kept = ask(filed, input=f"Hello {'word ' * 5_000}").json()
    assert kept["store"]
    fail(filed)
    long = {"input": "word " * 9_000}
    damaged = failure.startswith("damaged")
    for stream in (False, True):
        answer = ask(filed, **long, stream=stream)
        assert answer.status_code == 200
        assert last_object(answer)["store"] is damaged, "what is there is damaged, and more can be written"
    begun = ask(filed, **long, background=True)
    if damaged:
        assert begun.status_code == 200
    else:
        error_of(begun, 503, "store_failed")
    for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        told = filed.http.request(method, f"/v1/responses/{kept['id']}{path}")
        assert told.status_code in (200, 503), told.text
        assert told.status_code == 200 or told.json()["error"]["code"] == "store_failed"
    if not readable:
        after = ask(filed, previous_response_id=kept["id"])
        assert after.status_code in (200, 400, 503), after.text
    assert filed.complete(max_tokens=1).status_code == 200
    eventually(lambda: filed.idle and not filed.engine.places and filed.service.open_requests == 0)


def test_a_store_that_fails_in_the_midst_of_a_background_response_leaves_an_end(filed: LiveServer) -> None:
    filed.engine.hold_decode_after = 0
    begun = ask(filed, background=True, stream=False).json()
    eventually(lambda: bool(filed.engine.running))
    sql("PRAGMA query_only = ON")(filed)
    filed.engine.hold_decode_after = None
    eventually(lambda: filed.service.open_requests == 0)
    ended = filed.http.get(f"/v1/responses/{begun['id']}").json()
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
    assert not filed.engine.places


def test_a_server_that_is_killed_leaves_what_the_next_begins_again(filed: LiveServer, tmp_path: Path) -> None:
    filed.engine.hold_decode_after = 0
    begun = ask(filed, background=True).json()
    eventually(lambda: bool(filed.engine.running))
    in_store(filed, lambda store: store._db.close())  # as the death of its process does
    store = ResponseStore(tmp_path / "responses.db", 2**20, 86400.0)
    assert store.unfinished == [("", begun["id"])]
    kept = store.get("", begun["id"])
    assert kept is not None
    assert (kept.body["status"], kept.body["error"]) == ("queued", None)
    store.close()
    filed.http.post(f"/v1/responses/{begun['id']}/cancel")
    eventually(lambda: filed.idle)


def test_two_cancellations_are_one(keyed: LiveServer) -> None:
    """The second may come while the first still writes the response's end."""
    keyed.engine.hold_decode_after = 0
    begun = ask(keyed, ANN, background=True).json()
    eventually(lambda: bool(keyed.engine.running))
    run = keyed.service.background.running(keyed.service.keys._keys[0].digest.hex(), begun["id"])
    assert run is not None
    held, free = threading.Event(), threading.Event()
    hold = keyed.service.kept._do(lambda _: (held.set(), free.wait(20)), "")
    asyncio.run_coroutine_threadsafe(hold, keyed.loop)
    assert held.wait(20)
    keyed.call(run.cancel)
    eventually(lambda: bool(keyed.service.kept._pool._queues))
    keyed.call(run.cancel)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.02), keyed.loop).result(20)  # the loop turns some times
    free.set()
    eventually(lambda: keyed.service.open_requests == 0)
    ended = keyed.http.get(f"/v1/responses/{begun['id']}", headers=ANN).json()
    assert (ended["status"], ended["error"]) == ("cancelled", None)
    assert not keyed.engine.places


def test_one_keys_background_flood_neither_keeps_others_out_nor_drives_out_what_they_keep(keyed: LiveServer) -> None:
    kept = ask(keyed, BOB, input="Remember the owl.").json()["id"]
    keyed.engine.admission = Admission(8, 10**6, 64)
    keyed.engine.hold_prefill, keyed.engine._prefill_chunk = True, 10**6  # all of them wait
    answers = [ask(keyed, ANN, background=True, input="word " * 2_000) for _ in range(16)]
    begun = [answer.json()["id"] for answer in answers if answer.status_code == 200]
    assert len(begun) == 8
    for refused in answers[8:]:
        error_of(refused, 429, "queue_full")
    with keyed.http.stream(
        "POST", "/v1/responses", json={"model": MODEL, "input": "Hi", "stream": True}, headers=BOB
    ) as r:
        assert r.status_code == 200
    for name in begun:
        for method, path in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
            assert keyed.http.request(method, f"/v1/responses/{name}{path}", headers=BOB).status_code == 404
        error_of(ask(keyed, BOB, previous_response_id=name), 400, "previous_response_not_found")
    for name in begun:
        assert keyed.http.post(f"/v1/responses/{name}/cancel", headers=ANN).json()["status"] == "cancelled"
    eventually(lambda: keyed.idle and not keyed.engine.places)
    keyed.engine.hold_prefill = False
    owner = keyed.service.keys._keys[0].digest.hex()
    large = [{"id": "msg_1", "type": "message", "content": "word " * 20_000}]
    for number in range(20):
        assert in_store(
            keyed, lambda s, n=number: s.put(owner, {"id": f"r{n}", "status": "completed"}, large, [], None)
        )
    assert ask(keyed, ANN, previous_response_id="r0").status_code == 400
    assert keyed.http.get(f"/v1/responses/{kept}", headers=BOB).status_code == 200
    assert ask(keyed, BOB, previous_response_id=kept).status_code == 200


def test_a_reader_who_does_not_read_holds_up_no_background_response(keyed: LiveServer) -> None:
    keyed.engine.answer = lambda request: [5] * 20_000
    keyed.engine.burst = 50
    body = {"model": MODEL, "input": "Hi", "background": True, "stream": True}
    encoded = json.dumps(body).encode()
    with keyed.connect(b"", "/ready") as sock:
        sock.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer secret-of-ann\r\nContent-Length: %d\r\n\r\n%s" % (len(encoded), encoded)
        )
        eventually(lambda: bool(keyed.engine.requests), 20)
        assert ask(keyed, BOB, max_output_tokens=1).status_code == 200
        eventually(lambda: keyed.idle, 20)
    assert not keyed.engine.cancelled, "it went on to its end"
    eventually(lambda: keyed.service.open_requests == 0)


def test_chains_end(keyed: LiveServer) -> None:
    first = ask(keyed, ANN, input="One").json()["id"]
    second = ask(keyed, ANN, input="Two", previous_response_id=first).json()["id"]
    owner = keyed.service.keys._keys[0].digest.hex()
    in_store(keyed, lambda s: s._db.execute("UPDATE responses SET previous = ? WHERE id = ?", (second, first)))
    for path, fields in (("", {"max_output_tokens": 1}), ("/input_tokens", {})):
        body = {"model": MODEL, "input": "On", "previous_response_id": second, **fields}
        error_of(keyed.http.post(f"/v1/responses{path}", json=body, headers=ANN), 400, "previous_response_not_found")
    assert keyed.http.delete(f"/v1/responses/{first}", headers=ANN).status_code == 200
    error_of(ask(keyed, ANN, previous_response_id=second), 400, "previous_response_not_found")
    in_store(
        keyed, lambda s: [s.put(owner, {"id": f"r{n}", "status": "completed"}, [], [], f"r{n - 1}") for n in range(9)]
    )
    error_of(ask(keyed, ANN, previous_response_id="r8"), 400, "previous_response_not_found")
