"""The store of documents: what it holds, for how long, for whom, and after a restart."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from longreach.documents.document import NewDocument
from longreach.documents.errors import DocumentNotFoundError, DocumentQuotaError, DocumentTooLargeError
from longreach.documents.room import Limits
from longreach.documents.store import DocumentStore
from longreach.documents.tables import ROW_BYTES
from longreach.policies.values import Window
from longreach.util.database_file import StoreFileError

DAY = 86400.0
MIB = 2**20


class Clock:
    """A time of day that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Iterator[Callable[..., DocumentStore]]:
    """Makes stores, which are closed in the end."""
    made: list[DocumentStore] = []

    def make(
        path: Path | None = None, bytes_in_all: int = MIB, bytes_of_one: int | None = None, documents: int = 100
    ) -> DocumentStore:
        one = bytes_in_all if bytes_of_one is None else bytes_of_one
        made.append(DocumentStore(path, Limits(bytes_in_all, one, documents, DAY), clock))
        return made[-1]

    yield make
    for store in made:
        store.close()


def text(**fields: Any) -> NewDocument:
    return NewDocument(**{"kind": "text", "use": "chat", **fields})


def put(store: DocumentStore, owner: str = "ann", contents: bytes = b"The owl sleeps.", **fields: Any) -> str:
    document, _ = store.put(owner, text(**fields), contents)
    return document.id


def names(store: DocumentStore, owner: str = "ann") -> list[str | None]:
    return [document.name for document in store.page(owner, 100, "asc").documents]


def test_a_document_is_what_was_put(make: Callable[..., DocumentStore]) -> None:
    store = make()
    policy = Window(size=4096)
    new = text(name="owl", ttl=60.0, cache_salt="s", attention=policy, metadata={"purpose": "user_data"})
    document, is_new = store.put("ann", new, b"x" * (2 * MIB // 3), 17)
    assert is_new
    assert store.get("ann", document.id) == document
    assert store.contents("ann", document.id) == b"x" * (2 * MIB // 3)
    assert (document.name, document.state, document.tokens, document.bytes) == ("owl", "reading", 17, 2 * MIB // 3)
    assert (document.attention, document.metadata, document.expires) == (policy, {"purpose": "user_data"}, 1060.0)
    assert store.get("ann", document.id.replace("doc-", "file-")) == document


def test_nothing_of_one_owner_is_found_by_another(make: Callable[..., DocumentStore]) -> None:
    store = make()
    own = put(store, "ann", name="owl")
    for ask in (store.get, store.contents, store.use, store.delete):
        with pytest.raises(DocumentNotFoundError):
            ask("bob", own)
    with pytest.raises(DocumentNotFoundError):
        store.change("bob", own, text())
    with pytest.raises(DocumentNotFoundError):
        store.page("bob", 10, after=own)
    assert store.find("bob", "owl") == store.find("bob", own) == []
    assert names(store, "bob") == []
    assert put(store, "bob", name="owl") != own
    assert names(store) == ["owl"]


def test_the_same_document_is_kept_once(make: Callable[..., DocumentStore], clock: Clock) -> None:
    store = make()
    first = put(store, name="owl")
    clock.now += 50
    again, is_new = store.put("ann", text(name="owl", pinned=True), b"The owl sleeps.")
    assert (again.id, is_new, again.pinned, again.used) == (first, False, True, 1050.0)
    others: list[Any] = [
        {"name": "other"},
        {"name": None},
        {"name": "owl", "use": "completion"},
        {"name": "owl", "cache_salt": "s"},
        {"name": "owl", "attention": Window()},
        {"name": "owl", "kind": "messages"},
    ]
    assert len({first, *(put(store, **other) for other in others)}) == 7
    assert put(store, contents=b"The owl wakes.", name="owl") != first


def test_an_upload_comes_in_parts(make: Callable[..., DocumentStore], tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    store = make(path)
    begun = store.begin("ann", text(name="owl"))
    for part in (b"The owl", b" ", b"sleeps."):
        store.add("ann", begun.id, part)
    assert (store.get("ann", begun.id).state, store.get("ann", begun.id).bytes) == ("uploading", 15)
    document, is_new = store.finish("ann", begun.id, 9)
    assert (document.id, is_new, document.state, document.tokens) == (begun.id, True, "reading", 9)
    assert store.contents("ann", document.id) == b"The owl sleeps."
    assert put(store, name="owl") == document.id  # in whatever way it came, it is the same one
    again = store.begin("ann", text(name="owl"))
    store.add("ann", again.id, b"The owl sleeps.")
    assert store.finish("ann", again.id)[0].id == document.id
    with pytest.raises(DocumentNotFoundError):
        store.add("ann", document.id, b"more")
    unfinished = store.begin("ann", text(name="half"))
    store.add("ann", unfinished.id, b"The")
    store.close()
    assert names(make(path)) == ["owl"]


def test_a_restart_finds_everything(make: Callable[..., DocumentStore], tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    store = make(path)
    read, unread, pinned = put(store, name="read"), put(store, name="unread"), put(store, name="pinned", pinned=True)
    for document in (read, pinned):
        assert store.tell(document, "ready", 5)
    before = store.page("ann", 10).documents
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = make(path)
    assert again.page("ann", 10).documents == before
    assert [document.id for document in again.unread()] == [pinned, unread]
    with pytest.raises(StoreFileError, match="another server has it open"):
        make(path)


def test_a_file_that_cannot_be_a_store_stops_the_start(make: Callable[..., DocumentStore], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The owl sleeps. " * 100)
    other = make(tmp_path / "other")
    other._db.execute("PRAGMA user_version = 99")
    other.close()
    for name, words in (("text", "not a database"), ("other", "no store of documents"), ("absent/x", "No such file")):
        with pytest.raises(StoreFileError, match=words):
            make(tmp_path / name)


def test_what_is_deleted_is_gone_from_the_file(make: Callable[..., DocumentStore], tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    store = make(path)
    secret = put(store, contents=b"pass key 4071 " * 40_000)
    kept = put(store, contents=b"The owl")
    store._db.checkpoint()
    assert b"4071" in path.read_bytes()
    assert store.delete("ann", secret).id == secret
    assert [document.id for document in store.gone] == [secret]
    assert all(b"4071" not in file.read_bytes() for file in tmp_path.iterdir())
    assert store.contents("ann", kept) == b"The owl"
    with pytest.raises(DocumentNotFoundError):
        store.delete("ann", secret)


@pytest.mark.parametrize(
    ("fields", "at"),
    [({}, DAY), ({"ttl": 60.0}, 60.0), ({"pinned": True}, None), ({"pinned": True, "ttl": 60.0}, 60.0)],
)
def test_a_document_expires(
    make: Callable[..., DocumentStore], clock: Clock, fields: dict[str, Any], at: float | None
) -> None:
    store = make()
    document = put(store, **fields)
    assert store.get("ann", document).expires == (None if at is None else 1000.0 + at)
    clock.now += 50
    used = store.use("ann", document)
    assert (used.uses, used.used) == (1, 1050.0)
    assert used.expires == (None if at is None else 1050.0 + at)
    clock.now += (at or 100 * DAY) - 1
    assert len(store.find("ann", document)) == 1
    clock.now += 1
    assert len(store.find("ann", document)) == (at is None)
    assert store.expired == (at is not None)


def test_a_life_may_count_from_the_beginning(make: Callable[..., DocumentStore], clock: Clock) -> None:
    store = make()
    document = put(store, ttl=60.0, renews=False)
    clock.now += 50
    assert store.use("ann", document).expires == 1060.0


def test_what_was_used_longest_ago_makes_room(make: Callable[..., DocumentStore], clock: Clock) -> None:
    store = make(bytes_in_all=3 * (1000 + ROW_BYTES))
    ids = []
    for name in ("a", "b", "c"):
        clock.now += 1
        ids.append(put(store, contents=name.encode() * 1000, name=name))
    clock.now += 1
    store.use("ann", ids[0])
    put(store, contents=b"d" * 1000, name="d")
    assert names(store) == ["a", "c", "d"]
    assert [document.id for document in store.gone] == [ids[1]]
    assert store.evicted == 1


def test_pinned_documents_make_no_room(make: Callable[..., DocumentStore]) -> None:
    store = make(bytes_in_all=3 * (1000 + ROW_BYTES))
    for name in ("a", "b"):
        put(store, contents=name.encode() * 1000, name=name, pinned=True)
    for name in ("c", "d"):
        put(store, contents=name.encode() * 1000, name=name)
    assert names(store) == ["a", "b", "d"]
    with pytest.raises(DocumentQuotaError, match="pinned") as error:
        put(store, contents=b"e" * 3000, name="e")
    assert (error.value.code, error.value.headers["x-should-retry"]) == ("documents_pinned", "false")
    assert names(store) == ["a", "b", "d"]  # what would not be enough is not given up


def test_many_of_one_owner_do_not_drive_out_the_few_of_others(make: Callable[..., DocumentStore]) -> None:
    store = make(bytes_in_all=4 * (1000 + ROW_BYTES))
    put(store, "bob", contents=b"b" * 1000, name="bob's")
    for name in ("1", "2", "3", "4", "5"):
        put(store, contents=name.encode() * 1000, name=name)
    assert names(store, "bob") == ["bob's"]
    assert names(store) == ["3", "4", "5"]


def test_a_key_has_its_quota(make: Callable[..., DocumentStore]) -> None:
    store = make(bytes_in_all=MIB, bytes_of_one=3 * (1000 + ROW_BYTES), documents=3)
    with pytest.raises(DocumentTooLargeError, match="--documents-bytes-per-key"):
        put(store, contents=b"x" * 3 * (1000 + ROW_BYTES))
    for name in ("a", "b"):
        put(store, contents=name.encode() * 1000, name=name)
    with pytest.raises(DocumentQuotaError, match=r"--documents-bytes-per-key.*DELETE"):
        put(store, contents=b"c" * 1500)
    put(store, contents=b"c")
    with pytest.raises(DocumentQuotaError, match=r"--documents-per-key.*DELETE"):
        put(store, contents=b"d")
    assert len(names(store)) == 3
    put(store, "bob", contents=b"c" * 1500)


def test_an_upload_stops_where_there_is_no_room(make: Callable[..., DocumentStore]) -> None:
    store = make(bytes_in_all=5 * ROW_BYTES)
    put(store, name="old", contents=b"x" * 100)
    begun = store.begin("ann", text(name="new"))
    store.add("ann", begun.id, b"y" * 2 * ROW_BYTES)
    assert names(store) == ["old", "new"]
    store.add("ann", begun.id, b"y" * 2 * ROW_BYTES)
    assert names(store) == ["new"]  # and not the one that is being uploaded
    with pytest.raises(DocumentTooLargeError, match="--documents-bytes"):
        store.add("ann", begun.id, b"y")
    assert store.get("ann", begun.id).bytes == 4 * ROW_BYTES


def test_pages_follow_each_other(make: Callable[..., DocumentStore]) -> None:
    store = make()
    ids = [put(store, name=f"n{number % 2}", contents=bytes([number])) for number in range(5)]
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        seen: list[str] = []
        while True:
            page = store.page("ann", 2, order, seen[-1] if seen else None)  # pyright: ignore[reportArgumentType]
            seen += [document.id for document in page.documents]
            if not page.more:
                break
        assert seen == expected
    assert [document.id for document in store.page("ann", 9, name="n1").documents] == [ids[3], ids[1]]
    assert [document.id for document in store.find("ann", "n0")] == [ids[4], ids[2], ids[0]]


def test_another_name_is_to_be_read_again(make: Callable[..., DocumentStore], clock: Clock) -> None:
    store = make()
    document = put(store, name="owl", ttl=60.0)
    store.tell(document, "ready", 5)
    assert store.change("ann", document, text(name="owl", pinned=True)).state == "ready"
    assert store.get("ann", document).expires is None
    changed = store.change("ann", document, text(name="bird", ttl=10.0))
    assert (changed.state, changed.name, changed.pinned, changed.expires) == ("reading", "bird", False, 1010.0)


def test_a_document_that_is_gone_cannot_be_told(make: Callable[..., DocumentStore]) -> None:
    store = make()
    document = put(store)
    store.delete("ann", document)
    assert not store.tell(document, "ready", 5)


def test_totals_count_what_is_kept(make: Callable[..., DocumentStore]) -> None:
    store = make()
    first = put(store, contents=b"x" * 10, pinned=True)
    store.tell(first, "ready", 3)
    put(store, "bob", contents=b"y" * 20)
    totals = store.totals
    assert (totals.documents, totals.pinned, totals.bytes, totals.tokens) == (2, 1, 30, 3)


def test_a_row_that_cannot_be_read_is_an_error_of_the_database(make: Callable[..., DocumentStore]) -> None:
    store = make()
    document = put(store)
    store._db.execute('UPDATE documents SET attention = \'{"policy": "none"}\'')
    with pytest.raises(sqlite3.DatabaseError, match="damaged"):
        store.get("ann", document)
