"""The store of responses: what it holds, for how long, and after a restart."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from longreach.api.service.response_store import BrokenChainError, ChainTooLongError, ResponseStore
from longreach.api.service.service import Service
from longreach.config import load_settings
from longreach.errors import ConfigError
from longreach.util.database_file import StoreFileError

DAY = 86400.0


class Clock:
    """A time of day that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def body(name: str, status: str = "completed") -> dict[str, Any]:
    return {"id": name, "status": status, "output": [], "error": None}


def as_sent(whole: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(whole))


def item(name: str, text: str = "x") -> dict[str, Any]:
    return {"id": name, "type": "message", "content": text}


@pytest.fixture(params=["memory", "file"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., ResponseStore]]:
    """Opens a store with a clock of its own; the last one is closed at the end."""
    stores: list[ResponseStore] = []

    def store(max_bytes: int = 2**20, days: float = 30, clock: Callable[[], float] | None = None) -> ResponseStore:
        path = None if request.param == "memory" else tmp_path / "responses.db"
        stores.append(ResponseStore(path, max_bytes, days * DAY, clock or Clock()))
        return stores[-1]

    yield store
    stores[-1].close()


def test_a_response_comes_back_with_its_items(opened: Callable[..., ResponseStore]) -> None:
    store = opened()
    assert store.put("ann", body("a"), [item("i1")], [item("o1"), item("o2")], None)
    kept = store.get("ann", "a")
    assert kept is not None
    assert kept.whole == {**body("a"), "output": [item("o1"), item("o2")]}
    assert store.input_items("ann", "a") == [item("i1")]
    assert store.get("bob", "a") is None
    assert store.input_items("bob", "a") is None
    assert not store.delete("bob", "a")
    assert store.items_named("bob", ["i1", "o1"], 10**6) == {}
    assert store.items_named("ann", ["i1", "o2", "none"], 10**6) == {"i1": item("i1"), "o2": item("o2")}
    assert store.delete("ann", "a")
    assert store.used_bytes == 0


def test_a_conversation_is_a_chain(opened: Callable[..., ResponseStore]) -> None:
    store = opened()
    for number, previous in ((0, None), (1, "r0"), (2, "r1")):
        store.put("ann", body(f"r{number}"), [item(f"i{number}")], [item(f"o{number}")], previous)
    found = store.conversation("ann", "r2", 10**6)
    assert found is not None
    assert [one["id"] for one in found] == ["i0", "o0", "i1", "o1", "i2", "o2"]
    assert store.conversation("bob", "r2", 10**6) is None
    with pytest.raises(ChainTooLongError):
        store.conversation("ann", "r2", 100)
    newest = store.conversation("ann", "r2", 100, newest=True)
    assert newest is not None
    assert [one["id"] for one in newest] == ["i2", "o2"]
    store.delete("ann", "r1")
    with pytest.raises(BrokenChainError, match="r1"):
        store.conversation("ann", "r2", 10**6)


def test_a_circle_of_responses_ends(opened: Callable[..., ResponseStore]) -> None:
    store = opened()
    store.put("ann", body("a"), [], [], "b")
    store.put("ann", body("b"), [], [], "a")  # no request can name what is not there yet; a broken file could
    with pytest.raises(BrokenChainError):
        store.conversation("ann", "b", 10**6)


def test_what_was_not_used_for_longest_is_dropped(opened: Callable[..., ResponseStore]) -> None:
    clock = Clock()
    store = opened(max_bytes=4000, clock=clock)
    for name in ("a", "b", "c"):
        clock.now += 1
        store.put("ann", body(name), [item(f"i{name}", "x" * 300)], [], None)
    clock.now += 1
    store.put("ann", body("d"), [item("id", "x" * 300)], [], "a")  # uses `a`
    clock.now += 1
    store.put("ann", body("e"), [item("ie", "x" * 1400)], [], None)
    assert [name for name in "abcde" if store.get("ann", name) is not None] == ["a", "d", "e"]
    assert store.used_bytes <= 4000
    assert not store.put("ann", body("f"), [item("if", "x" * 5000)], [], None)
    assert store.get("ann", "e") is not None


def test_nobodys_many_responses_drive_out_the_few_of_others(opened: Callable[..., ResponseStore]) -> None:
    clock = Clock()
    store = opened(max_bytes=6000, clock=clock)
    store.put("ann", body("a"), [item("i")], [], None)
    store.put("bob", body("running", "in_progress"), [item("i")], [], None)
    for number in range(50):
        clock.now += 1
        store.put("bob", body(f"b{number}"), [item("i", "x" * 300)], [], None)
    assert store.get("ann", "a") is not None
    assert store.get("bob", "running") is not None, "what is being made goes last"
    assert [number for number in range(50) if store.get("bob", f"b{number}") is not None] == [*range(45, 50)]
    assert store.used_bytes <= 6000


def test_numbers_are_kept_as_they_are(opened: Callable[..., ResponseStore]) -> None:
    store = opened()
    long = {**body("a"), "tools": [{"maximum": 10**40, "minimum": -(2**63) - 1, "multipleOf": 0.5}]}
    store.put("ann", long, [], [], None)
    store.update("ann", long, [])
    kept = store.get("ann", "a")
    assert kept is not None
    assert kept.whole == long


def test_log_probabilities_are_no_part_of_a_conversation(opened: Callable[..., ResponseStore]) -> None:
    """They are kept, but no prompt has them: they neither count as its bytes nor are read for it."""
    store = opened()
    scores = [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}] * 50
    parts = [{"type": "output_text", "text": "x", "logprobs": scores}, {"type": "refusal", "refusal": "no"}]
    output = [
        {"id": "r", "type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"id": "o", "type": "message", "content": parts},
        {"id": "c", "type": "function_call", "arguments": "{}"},
    ]
    told = {**body("a"), "output": output}
    store.put("ann", body("a", "queued"), [item("i")], [], None)
    assert store.update("ann", told, output)
    kept = store.get("ann", "a")
    assert kept is not None
    assert as_sent(kept.whole) == told
    assert store.used_bytes > 50 * 50
    read = store.conversation("ann", "a", 1_000)
    assert read is not None
    assert read[2]["content"] == [{**parts[0], "logprobs": []}, parts[1]]
    assert store.items_named("ann", ["o"], 500)["o"] == read[2]
    store.put("ann", told, [item("i")], output, None)
    again = store.get("ann", "a")
    assert again is not None
    assert as_sent(again.whole) == told


def test_one_id_of_many_items_costs_no_more_than_another(opened: Callable[..., ResponseStore]) -> None:
    """Ids of items are the callers' own: many items may have one, and nobody else's search passes them."""
    store = opened()
    for number in range(20):
        store.put("bob", body(f"b{number}"), [item("same", str(number))], [], None)
    store.put("ann", body("a"), [item("same", "ann")], [], None)
    assert store.items_named("bob", ["same"], 10**6) == {"same": item("same", "19")}
    assert store.items_named("ann", ["same"], 10**6) == {"same": item("same", "ann")}
    statement = "SELECT body FROM items WHERE owner = 'ann' AND id = 'same' ORDER BY response DESC LIMIT 1"
    [(*_, plan)] = store._db.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
    assert plan == "SEARCH items USING INDEX by_id (owner=? AND id=?)", "found and in order by the index alone"


def test_a_chain_that_is_too_long_to_be_read_costs_no_more(
    opened: Callable[..., ResponseStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.api.service.response_store._LONGEST_CHAIN", 5)
    clock = Clock()
    store = opened(clock=clock)
    for number in range(9):
        clock.now += 1
        store.put("ann", body(f"r{number}"), [item(f"i{number}")], [], f"r{number - 1}" if number else None)
    with pytest.raises(ChainTooLongError, match="5 responses"):
        store.conversation("ann", "r8", 10**6)
    newest = store.conversation("ann", "r8", 10**6, newest=True)
    assert newest is not None
    assert [one["id"] for one in newest] == ["i4", "i5", "i6", "i7", "i8"]
    used = dict(store._db.execute("SELECT id, used FROM responses").fetchall())
    assert used["r3"] == used["r7"] == clock.now
    assert used["r2"] < clock.now, "a use goes no further back than a conversation is read"


def test_a_response_that_is_updated_is_counted_once(opened: Callable[..., ResponseStore]) -> None:
    store = opened()
    store.put("ann", body("a", "queued"), [item("i1")], [], None)
    for text in ("x" * 1000, "y"):
        assert store.update("ann", body("a"), [item("o1", text)])
    once = store.used_bytes
    kept = store.get("ann", "a")
    assert kept is not None
    assert kept.output == [item("o1", "y")]
    assert store.input_items("ann", "a") == [item("i1")]
    assert not store.update("bob", body("a"), [])
    store.put("ann", body("a"), [item("i1")], [item("o1", "y")], None)
    assert store.used_bytes == once
    store.delete("ann", "a")
    assert store.used_bytes == 0


def test_a_response_lives_so_long_after_its_last_use(opened: Callable[..., ResponseStore]) -> None:
    clock = Clock()
    store = opened(days=1, clock=clock)
    store.put("ann", body("a"), [item("ia")], [], None)
    store.put("ann", body("b"), [item("ib")], [], None)
    clock.now += 0.9 * DAY
    store.put("ann", body("c"), [], [], "a")
    clock.now += 0.5 * DAY
    assert store.get("ann", "b") is None
    assert store.items_named("ann", ["ia", "ib"], 10**6) == {"ia": item("ia")}
    assert store.conversation("ann", "c", 10**6) == [item("ia")]
    clock.now += DAY
    assert store.conversation("ann", "c", 10**6) is None
    assert store.used_bytes == 0


def test_a_failed_change_changes_nothing(opened: Callable[..., ResponseStore]) -> None:
    store = opened()
    store.put("ann", body("a"), [item("i1")], [], None)
    before = store.used_bytes
    with pytest.raises(TypeError):
        store.put("ann", {**body("a"), "bad": object()}, [], [], None)
    with pytest.raises(KeyError):
        store.put("ann", body("a"), [{"no": "id"}], [], None)
    assert store.used_bytes == before
    assert store.input_items("ann", "a") == [item("i1")]


def test_what_was_running_has_failed_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, 2**20, DAY)
    for name, status in (("a", "queued"), ("b", "in_progress"), ("c", "completed"), ("d", "cancelled")):
        store.put("ann", body(name, status), [item(f"i{name}")], [], None)
    size = store.used_bytes
    store.close()
    store = ResponseStore(path, 2**20, DAY)
    found = {name: kept.body for name in "abcd" if (kept := store.get("ann", name)) is not None}
    assert {name: one["status"] for name, one in found.items()} == {
        "a": "failed",
        "b": "failed",
        "c": "completed",
        "d": "cancelled",
    }
    assert found["a"]["error"]["code"] == "server_error"
    assert found["c"]["error"] is None
    assert store.used_bytes == size
    store.close()
    smaller = ResponseStore(path, 1, DAY)
    assert smaller.used_bytes == 0
    smaller.close()


def test_what_was_running_can_be_begun_again_a_few_times(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, 2**20, DAY)
    request = b'{"model":"m","seed":12345678901234567890123}'
    for name, status in (("a", "queued"), ("b", "in_progress"), ("c", "in_progress")):
        store.put("ann", body(name, status), [item(f"i{name}")], [], None, request)
    size = store.used_bytes
    store.update("ann", body("c"), [])
    assert size - store.used_bytes >= len(request)
    for tries in (2, 3):
        store.close()
        store = ResponseStore(path, 2**20, DAY)
        assert store.unfinished == [("ann", "a"), ("ann", "b")]
        begun = store.begin_again("ann", "a")
        assert begun is not None
        assert (begun.tries, begun.request, begun.given) == (tries, json.loads(request), [item("ia")])
        assert store.begin_again("bob", "a") is None
        assert store.begin_again("ann", "c") is None
    assert store.end_unfinished("ann", "b", "cancelled", None)
    store.close()
    store = ResponseStore(path, 2**20, DAY)
    assert store.unfinished == []
    found = {name: kept.body["status"] for name in "abc" if (kept := store.get("ann", name)) is not None}
    assert found == {"a": "failed", "b": "cancelled", "c": "completed"}
    assert store.delete("ann", "a")
    assert store.delete("ann", "b")
    assert store.delete("ann", "c")
    assert store.used_bytes == 0
    store.close()


def test_a_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "old.db", 2**20, DAY)
    store.put("ann", body("a"), [item("i")], [], None)
    store._db.execute("DROP TABLE requests")
    store._db.execute("PRAGMA user_version = 2")
    store.close()
    store = ResponseStore(tmp_path / "old.db", 2**20, DAY)
    assert store.get("ann", "a") is not None
    assert store.put("ann", body("b", "queued"), [item("i")], [], None, b"{}")
    store.close()


def test_prompts_are_for_nobody_elses_eyes_and_gone_when_deleted(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, 2**20, DAY)
    store.put("ann", body("a"), [item("i1", "the owl sleeps " * 500)], [], None)
    files = [*tmp_path.iterdir()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert any(b"the owl sleeps" in file.read_bytes() for file in files)
    store.delete("ann", "a")
    assert not any(b"the owl sleeps" in file.read_bytes() for file in tmp_path.iterdir())
    store.close()


def test_a_file_that_is_gone_takes_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, 2**20, DAY)
    store.put("ann", body("a"), [item("i1")], [], None)
    for name in ("responses.db", "responses.db-wal"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(sqlite3.OperationalError, match="deleted or replaced; start the server again"):
        store.put("ann", body("b"), [], [], None)
    path.touch()
    with pytest.raises(sqlite3.OperationalError, match="deleted or replaced"):
        store.update("ann", body("a"), [])
    assert store.get("ann", "a") is not None
    assert store.get("ann", "b") is None
    store.close()


DAMAGE = {
    "no JSON": "UPDATE responses SET body = x'00ff'",
    "another type": "UPDATE responses SET body = 7",
    "no status": """UPDATE responses SET body = '{"id": "a"}'""",
    "a list": "UPDATE responses SET body = '[]'",
}


@pytest.mark.parametrize("statement", DAMAGE.values(), ids=DAMAGE)
def test_a_row_that_cannot_be_read_is_an_error_of_the_database(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, 2**20, DAY)
    store.put("ann", body("a", "queued"), [item("i1")], [], None)
    store._db.execute(statement)
    with pytest.raises(sqlite3.DatabaseError, match="damaged"):
        store.get("ann", "a")
    store._db.execute("UPDATE items SET body = 'x'")
    with pytest.raises(sqlite3.DatabaseError, match="damaged"):
        store.conversation("ann", "a", 10**6)
    store.close()
    with pytest.raises(StoreFileError, match=r"damaged; without the file, the server makes a new one$"):
        ResponseStore(path, 2**20, DAY)


@pytest.mark.parametrize("kept_bytes", [100, 5000, 9000])
def test_a_torn_file_stops_the_start(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, 2**20, DAY)
    for number in range(40):
        store.put("ann", body(f"a{number}"), [item("i1", "x" * 900)], [], None)
    store.close()
    whole = path.read_bytes()
    for torn in (whole[:kept_bytes], whole[:kept_bytes] + b"\xa5" * (len(whole) - kept_bytes)):
        path.write_bytes(torn)
        with pytest.raises(StoreFileError, match="without the file"):
            ResponseStore(path, 2**20, DAY)


def test_a_file_that_cannot_be_a_store_stops_the_start(tmp_path: Path, model_dir: Path) -> None:
    store = ResponseStore(tmp_path / "taken.db", 2**20, DAY)
    (tmp_path / "text.db").write_text("The owl sleeps. " * 100)
    other = ResponseStore(tmp_path / "other.db", 2**20, DAY)
    other._db.execute("PRAGMA user_version = 99")
    other.close()
    for name, words in (
        ("taken.db", "another server"),
        ("text.db", "not a database"),
        ("other.db", "another version"),
        ("absent/x.db", "No such file"),
        (".", "directory"),
    ):
        with pytest.raises(StoreFileError, match=words):
            ResponseStore(tmp_path / name, 2**20, DAY)
        with pytest.raises(ConfigError, match=f"^--responses-store: .*{words}"):
            Service(load_settings(model=str(model_dir), responses_store=os.fspath(tmp_path / name)))
    store.close()
