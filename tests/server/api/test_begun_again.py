"""Background responses that were being made when their server ended: the next one begins again."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from longreach.api.responses.in_background import begin_again

from tests.server.api.conftest import LiveServer, eventually
from tests.server.api.test_chat import TEMPLATE
from tests.server.api.test_identified import events_of
from tests.server.api.test_responses_background import begin, ended, state

Make = Callable[..., LiveServer]
SCHEMA = {"type": "object", "properties": {"maximum": {"type": "integer"}}}
TOOLS = [{"type": "function", "name": "look", "parameters": SCHEMA}]


@pytest.fixture
def make(make_server: Make, tmp_path: Path) -> Make:
    """A server whose store is the file `responses.db` of a folder."""

    def of(folder: str, **settings: Any) -> LiveServer:
        (tmp_path / folder).mkdir(exist_ok=True)
        store = str(tmp_path / folder / "responses.db")
        return make_server(template=TEMPLATE, responses_store=store, **settings)

    return of


def crash(server: LiveServer, tmp_path: Path) -> None:
    """Leave in the folder `after` what a server that is killed now would leave; it is ended in peace."""
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    server.engine.hold_decode_after = None
    eventually(lambda: server.service.open_requests == 0)


def close(server: LiveServer) -> None:
    asyncio.run_coroutine_threadsafe(server.service.kept.stop(), server.loop).result(10)


def go_on(server: LiveServer) -> None:
    asyncio.run_coroutine_threadsafe(begin_again(server.service), server.loop).result(10)


def test_what_a_killed_server_was_making_is_made_by_the_next(make: Make, tmp_path: Path) -> None:
    wanted = {"tools": TOOLS, "temperature": 0.5, "seed": 7, "metadata": {"a": "b"}, "max_output_tokens": 40}
    with make("before") as server:
        before = ended(server, begin(server, input="A first turn"))
        server.engine.hold_decode_after = 3
        begun = begin(server, previous_response_id=before["id"], **wanted)
        eventually(lambda: state(server, begun)["status"] == "in_progress" and bool(server.engine.running))
        crash(server, tmp_path)
        plain, request = ended(server, begun), server.engine.requests[-1]
        close(server)
    with make("after", handover=True) as server:
        waiting = state(server, begun)
        assert (waiting["status"], waiting["output"], waiting["error"]) == ("queued", [], None)
        go_on(server)
        again = ended(server, begun)
        [asked] = server.engine.requests
        assert (asked.prompt, asked.sampling, asked.max_tokens) == (
            request.prompt,
            request.sampling,
            request.max_tokens,
        )
        told = {name: value for name, value in plain.items() if name not in ("completed_at", "output")}
        assert {name: again[name] for name in told} == told
        assert [item["content"] for item in again["output"]] == [item["content"] for item in plain["output"]]
        assert server.service.kept.waiting == []
        items = server.http.get(f"/v1/responses/{begun['id']}/input_items").json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["Hello"]
        eventually(lambda: not server.engine.places)
        close(server)
    with make("after") as server:
        assert server.service.kept.waiting == []
        assert state(server, begun) == again
        close(server)


def test_its_events_have_numbers_of_their_own(make: Make, tmp_path: Path) -> None:
    with make("before") as server:
        server.engine.hold_decode_after = 3
        body = {"model": server.service.settings.name, "input": "Hello", "background": True, "stream": True}
        with server.http.stream("POST", "/v1/responses", json=body) as response:
            lines = response.iter_lines()
            name = json.loads(next(line for line in lines if line.startswith("data: "))[6:])["response"]["id"]
        crash(server, tmp_path)
        close(server)
    path = f"/v1/responses/{name}?stream=true"
    with make("after") as server:
        refused = server.http.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        go_on(server)
        events = events_of(server.http.get(path).text)
        first = 1 << 28
        assert [int(number) for number, _ in events] == list(range(first, first + len(events)))
        assert [json.loads(event.partition("data: ")[2])["sequence_number"] for _, event in events][:3] == [
            *range(first, first + 3)
        ]
        assert "response.created" in events[0][1]
        assert "response.completed" in events[-1][1]
        assert events_of(server.http.get(f"{path}&starting_after={first + 1}").text) == events[2:]
        assert "events_dropped" in server.http.get(f"{path}&starting_after=2").text
        close(server)


def test_who_waits_is_cancelled_or_deleted(make: Make, tmp_path: Path) -> None:
    with make("before") as server:
        server.engine.hold_decode_after = 3
        both = [begin(server), begin(server)]
        eventually(lambda: len(server.engine.running) == 2)
        crash(server, tmp_path)
        close(server)
    cancelled, deleted = (f"/v1/responses/{one['id']}" for one in both)
    with make("after") as server:
        assert server.http.post(f"{cancelled}/cancel").json()["status"] == "cancelled"
        assert server.http.delete(deleted).status_code == 200
        go_on(server)
        assert not server.engine.requests
        assert server.http.get(cancelled).json()["status"] == "cancelled"
        assert server.http.get(deleted).status_code == 404
        close(server)


def test_what_cannot_be_begun_again_has_failed(make: Make, tmp_path: Path) -> None:
    ann, bob = "ann:secret-of-ann", "bob:secret-of-bob"
    with make("before", api_key=f"{ann},{bob}") as server:
        server.engine.hold_decode_after = 3
        names = []
        for key in ("secret-of-ann", "secret-of-bob"):
            server.http.headers["Authorization"] = f"Bearer {key}"
            names.append(begin(server)["id"])
        eventually(lambda: len(server.engine.running) == 2)
        crash(server, tmp_path)
        close(server)
    with make("after", api_key=bob) as server:
        go_on(server)
        server.http.headers["Authorization"] = "Bearer secret-of-bob"
        assert ended(server, {"id": names[1]})["status"] == "completed"
        [asked] = server.engine.requests
        assert (asked.caller, asked.cache_salt[-1]) == ("bob", "/")
        close(server)
    with make("after", api_key=ann) as server:
        server.http.headers["Authorization"] = "Bearer secret-of-ann"
        failed = state(server, {"id": names[0]})
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        close(server)


def test_a_server_that_ends_leaves_it_to_the_next(make: Make) -> None:
    with make("same") as server:
        server.engine.hold_decode_after = 1
        begun = begin(server)
        eventually(lambda: bool(server.engine.running))
        asyncio.run_coroutine_threadsafe(server.service.drain(0.05, asyncio.Event()), server.loop).result(10)
        eventually(lambda: server.idle and not server.service.open_requests)
        close(server)
    with make("same") as server:
        go_on(server)
        assert ended(server, begun)["status"] == "completed"
        close(server)


def test_what_one_server_leaves_when_it_ends_is_made_by_the_one_that_waits(make: Make, tmp_path: Path) -> None:
    with make("before") as old:
        old.engine.hold_decode_after = 3
        begun = begin(old)
        eventually(lambda: state(old, begun)["status"] == "in_progress")
        crash(old, tmp_path)
        close(old)
        database = sqlite3.connect(tmp_path / "after" / "responses.db")
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("BEGIN EXCLUSIVE")
        with make("after", handover=True) as new:
            going_on = asyncio.run_coroutine_threadsafe(begin_again(new.service), new.loop)
            time.sleep(0.1)
            assert not new.engine.requests
            database.close()
            going_on.result(10)
            assert ended(new, begun)["status"] == "completed"
            close(new)
