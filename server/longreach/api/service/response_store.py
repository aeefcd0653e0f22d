"""The responses that are kept for later requests: rows of a SQLite database in memory or in a file.

A response is kept with the items of its own input and output, and names the response before it. A conversation is the
chain of those. What is full drops the responses that have not been used for longest, of the owner who keeps the most.
Using a response uses its chain.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from longreach.api.service.kept import Item, Kept
from longreach.api.service.store_database import StoreDatabase, loaded
from longreach.api.service.unfinished import (
    ROW_BYTES,
    UNFINISHED,
    Begun,
    Unfinished,
    count_try,
    find_unfinished,
    forget_request,
    keep_request,
)
from longreach.util import exact_json
from longreach.util.database_file import file_error

Side = Literal["input", "output"]

_LONGEST_CHAIN = 10_000


class BrokenChainError(Exception):
    """A response of a conversation is not kept any more; the message is its id."""


class ChainTooLongError(Exception):
    """A conversation is longer than was allowed; the message is what it may have."""


class ResponseStore:
    """The responses of one server, at most `max_bytes` of them, each for `max_seconds` after its last use.

    Not for several threads at once. Nothing of one `owner` is found under another.

    Attributes:
        unfinished: what was being made when the server before this one ended, and can be begun again.

    Raises:
        StoreFileError: the file is not a store, is another server's, or cannot be opened.
    """

    def __init__(
        self, path: Path | None, max_bytes: int, max_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._clock = clock
        self._db = StoreDatabase(path)
        try:
            self._bytes = Counter(dict(self._db.execute("SELECT owner, sum(bytes) FROM responses GROUP BY owner")))
            self.unfinished = self._find_unfinished()
            self._expire()
            with self._change():
                self._drop_old()
        except sqlite3.Error as error:
            self._db.close()
            raise file_error(error) from None

    @property
    def is_file(self) -> bool:
        """Whether it is there after this process."""
        return self._path is not None

    @property
    def used_bytes(self) -> int:
        """About what all responses take."""
        return self._bytes.total()

    def put(
        self,
        owner: str,
        body: dict[str, Any],
        given: Sequence[Item],
        output: Sequence[Item],
        previous: str | None,
        request: bytes | None = None,
    ) -> bool:
        """Keep a response, in place of what is kept under its id; False if it alone is larger than the store.

        `body` is the response's object, `given` its own input. Both have ids. One that is being made can be begun again
        where its `request` is kept until it has ended: a JSON object without the input.
        """
        parts = Kept.of(body, output)
        bare = exact_json.dumps(parts.body)
        rows = [
            (side, place, item["id"], exact_json.dumps(item))
            for side, items in (("input", given), ("output", parts.output))
            for place, item in enumerate(items)
        ]
        size = len(bare) + ROW_BYTES + sum(len(row[3]) + ROW_BYTES for row in rows)
        size += 0 if request is None else len(request) + ROW_BYTES
        with self._change():
            self._remove("id = ?", body["id"])
            if size > self._max_bytes:
                return False
            now = self._clock()
            number = self._db.execute(
                "INSERT INTO responses (id, owner, previous, created, used, bytes, status, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (body["id"], owner, previous, now, now, size, body["status"], bare),
            ).lastrowid
            assert number is not None, "it has been inserted"
            self._db.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)",
                [(number, side, place, owner, item_id, item) for side, place, item_id, item in rows],
            )
            if request is not None:
                keep_request(self._db, number, request)
            self._bytes[owner] += size
            if previous is not None:
                self._use(owner, previous, now)
            self._drop_old()
        return True

    def update(self, owner: str, body: dict[str, Any], output: Sequence[Item]) -> bool:
        """Keep another state of a response, whose own input stays; False if it is not kept."""
        parts = Kept.of(body, output)
        bare = exact_json.dumps(parts.body)
        rows = [(place, item["id"], exact_json.dumps(item)) for place, item in enumerate(parts.output)]
        with self._change():
            row = self._db.execute(
                "SELECT number, bytes, length(body) FROM responses WHERE id = ? AND owner = ?", (body["id"], owner)
            ).fetchone()
            if row is None:
                return False
            number, size, old = row
            which = "FROM items WHERE response = ? AND side = 'output'"
            gone = self._db.execute(f"SELECT length(body) {which}", (number,)).fetchall()
            self._db.execute(f"DELETE {which}", (number,))
            more = len(bare) - old + sum(len(row[2]) + ROW_BYTES for row in rows)
            more -= sum(length + ROW_BYTES for (length,) in gone)
            if body["status"] not in UNFINISHED:
                more -= forget_request(self._db, number)
            self._db.executemany(
                "INSERT INTO items VALUES (?, 'output', ?, ?, ?, ?)",
                [(number, place, owner, item_id, item) for place, item_id, item in rows],
            )
            self._db.execute(
                "UPDATE responses SET status = ?, body = ?, used = ?, bytes = ? WHERE number = ?",
                (body["status"], bare, self._clock(), size + more, number),
            )
            self._bytes[owner] += more
            self._drop_old()
        return True

    def begin_again(self, owner: str, response_id: str) -> Begun | None:
        """Note that a response is begun once more; what that needs. None if it is not kept, or has ended."""
        with self._change():
            found = count_try(self._db, Unfinished(owner, response_id))
        if found is None:
            return None
        number, created, tries, request = found
        return Begun(tries, request, self._items(number, "input"), created)

    def end_unfinished(self, owner: str, response_id: str, status: str, error: dict[str, str] | None) -> bool:
        """Let a response that nobody makes any more end in this status; False if there is none."""
        row = self._find(owner, response_id)
        if row is None:
            return False
        ended = {**loaded(row[1], "status", left="output"), "status": status, "error": error, "output": []}
        return self.update(owner, ended, [])

    def get(self, owner: str, response_id: str) -> Kept | None:
        """A response by its id."""
        found = self._find(owner, response_id)
        if found is None:
            return None
        number, body = found
        return Kept(loaded(body, "status", left="output"), self._items(number, "output"))

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; False if there is none. What was built on it cannot be continued any more."""
        with self._change():
            gone = self._remove("id = ? AND owner = ?", response_id, owner)
        if gone:
            self._db.checkpoint()  # what was overwritten is gone from the file, too
        return gone

    def conversation(self, owner: str, response_id: str, most_bytes: int, newest: bool = False) -> list[Item] | None:
        """The items of a response and of all before it, oldest first; None if the response is not kept.

        Raises:
            BrokenChainError: one before it is not kept.
            ChainTooLongError: they have more than `most_bytes`; with `newest`, the oldest are left out instead.
        """
        self._expire()
        turns: list[list[Item]] = []
        left = most_bytes
        seen: set[str] = set()
        current: str | None = response_id
        while current is not None:
            row = self._db.execute(
                "SELECT number, previous, (SELECT coalesce(sum(length(body)), 0) FROM items WHERE response = number)"
                " FROM responses WHERE id = ? AND owner = ?",
                (current, owner),
            ).fetchone()
            if row is None and not turns:
                return None
            if row is None or current in seen:
                raise BrokenChainError(current)
            seen.add(current)
            number, previous, size = row
            left -= size
            if left < 0 or len(seen) > _LONGEST_CHAIN:
                if newest and turns:
                    break
                raise ChainTooLongError(f"{most_bytes} bytes" if left < 0 else f"{_LONGEST_CHAIN} responses")
            turns.append([*self._items(number, "input"), *self._items(number, "output")])
            current = previous
        return [item for turn in reversed(turns) for item in turn]

    def items_named(self, owner: str, ids: Sequence[str], most_bytes: int) -> dict[str, Item]:
        """Items by their ids, those that are kept; of several with one id the newest.

        Raises:
            ChainTooLongError: they have more than `most_bytes`.
        """
        self._expire()
        found: dict[str, Item] = {}
        left = most_bytes
        for item_id in ids:
            row = self._db.execute(
                "SELECT body FROM items WHERE owner = ? AND id = ? ORDER BY response DESC LIMIT 1", (owner, item_id)
            ).fetchone()
            if row is not None:
                left -= len(row[0])
                if left < 0:
                    raise ChainTooLongError(f"{most_bytes} bytes")
                found[item_id] = loaded(row[0], "type")
        return found

    def input_items(self, owner: str, response_id: str) -> list[Item] | None:
        """The items of a response's own input, in their order."""
        found = self._find(owner, response_id)
        return None if found is None else self._items(found[0], "input")

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _find(self, owner: str, response_id: str) -> tuple[int, bytes] | None:
        self._expire()
        row = self._db.execute(
            "SELECT number, body FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
        ).fetchone()
        return None if row is None else (row[0], row[1])

    def _items(self, number: int, side: Side) -> list[Item]:
        rows = self._db.execute("SELECT body FROM items WHERE response = ? AND side = ? ORDER BY place", (number, side))
        return [loaded(body, "type") for (body,) in rows]

    def _use(self, owner: str, response_id: str, now: float) -> None:
        """Note that a conversation is used; of a chain that is too long to be read, no more than could be."""
        self._db.execute(
            "WITH RECURSIVE chain (id, previous) AS ("
            " SELECT id, previous FROM responses WHERE id = :id AND owner = :owner"
            " UNION SELECT r.id, r.previous FROM responses r JOIN chain ON r.id = chain.previous AND r.owner = :owner"
            " LIMIT :longest)"
            " UPDATE responses SET used = :now WHERE id IN (SELECT id FROM chain)",
            {"id": response_id, "owner": owner, "now": now, "longest": _LONGEST_CHAIN},
        )

    def _expire(self) -> None:
        """Forget what has not been used for too long."""
        since = self._clock() - self._max_seconds
        if self._db.execute("SELECT 1 FROM responses WHERE used < ? LIMIT 1", (since,)).fetchone() is not None:
            with self._change():
                self._remove("used < ?", since)

    def _drop_old(self) -> None:
        """Make the store as small as it has to be. Nobody's many responses drive out the few of others."""
        while self._bytes.total() > self._max_bytes:
            [(owner, _)] = self._bytes.most_common(1)
            self._remove("number = ?", self._oldest(owner))

    def _oldest(self, owner: str) -> int:
        """The response that was not used for longest; one that is being made only where there is no other."""
        for which in (f"AND status NOT IN {UNFINISHED}", ""):
            row = self._db.execute(
                f"SELECT number FROM responses WHERE owner = ? {which} ORDER BY used, number LIMIT 1",  # noqa: S608
                (owner,),
            ).fetchone()
            if row is not None:
                return row[0]
        raise sqlite3.DatabaseError("its sizes are wrong; the file is damaged")

    def _remove(self, which: str, *values: object) -> bool:
        rows = self._db.execute(f"SELECT owner, bytes FROM responses WHERE {which}", values).fetchall()  # noqa: S608
        if rows:
            self._db.execute(f"DELETE FROM responses WHERE {which}", values)  # noqa: S608
            for owner, size in rows:
                self._bytes[owner] -= size
        return bool(rows)

    def _find_unfinished(self) -> list[Unfinished]:
        with self._change():
            again, less = find_unfinished(self._db)
            for owner, gone in less:
                self._bytes[owner] -= gone
        return again

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction, and the counts of bytes with it."""
        before = self._bytes.copy()
        try:
            with self._db.change():
                yield
        except BaseException:
            self._bytes = before
            raise
