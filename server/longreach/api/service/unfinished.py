"""Responses that were being made when their server ended: their requests are kept, and the next server begins again.

Of a request its input is kept as the items of the response, which are kept anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from longreach.api.service.kept import Item
from longreach.api.service.store_database import StoreDatabase, json_object, loaded
from longreach.util import exact_json

UNFINISHED = ("queued", "in_progress")
# A response that servers may die of is begun so many times at most.
_MOST_TRIES = 3
# What a row takes beside its JSON, about.
ROW_BYTES = 256
_INTERRUPTED = {
    "code": "server_error",
    "message": "The server ended before this response was finished.",
}


class Unfinished(NamedTuple):
    """A response that nobody makes at this moment, by its owner and its id."""

    owner: str
    response_id: str


@dataclass(frozen=True)
class Begun:
    """What is needed to begin a response again.

    Attributes:
        tries: how many times it has been begun, this one included.
        request: the request's JSON object without its input.
        given: the items of its input.
        created: when it was created, in seconds since the epoch.
    """

    tries: int
    request: dict[str, Any]
    given: list[Item]
    created: int


def keep_request(db: StoreDatabase, number: int, request: bytes) -> None:
    """Keep the request of the response in the row `number`, which has begun: a JSON object without the input."""
    db.execute("INSERT INTO requests VALUES (?, 1, ?)", (number, request))


def forget_request(db: StoreDatabase, number: int) -> int:
    """Let go of the request of a response that has ended; the bytes that it took."""
    row = db.execute("SELECT length(body) FROM requests WHERE response = ?", (number,)).fetchone()
    if row is None:
        return 0
    db.execute("DELETE FROM requests WHERE response = ?", (number,))
    return row[0] + ROW_BYTES


def count_try(db: StoreDatabase, which: Unfinished) -> tuple[int, int, int, dict[str, Any]] | None:
    """Note that a response is begun once more: its row's number, when it was created, tries, and its request.

    None if it is not kept, or has ended.
    """
    row = db.execute(
        "SELECT number, created, tries, requests.body FROM responses JOIN requests ON response = number"
        " WHERE owner = ? AND id = ?",
        which,
    ).fetchone()
    if row is None:
        return None
    number, created, tries, body = row
    db.execute("UPDATE requests SET tries = ? WHERE response = ?", (tries + 1, number))
    return number, int(created), tries + 1, json_object(body)


def find_unfinished(db: StoreDatabase) -> tuple[list[Unfinished], list[tuple[str, int]]]:
    """What was running when the server ended: responses that are begun again, the oldest first.

    The others have failed; of each, its owner and the bytes that it takes no longer.
    """
    rows = db.execute(
        "SELECT number, owner, id, responses.body, tries FROM responses LEFT JOIN requests ON response = number"
        " WHERE status IN (?, ?) ORDER BY number",
        UNFINISHED,
    ).fetchall()
    again: list[Unfinished] = []
    less: list[tuple[str, int]] = []
    for number, owner, response_id, body, tries in rows:
        if tries is not None and tries < _MOST_TRIES:
            again.append(Unfinished(owner, response_id))
            continue
        gone = forget_request(db, number)
        failed = {**loaded(body, "status"), "status": "failed", "error": _INTERRUPTED}
        db.execute(
            "UPDATE responses SET status = 'failed', body = ?, bytes = bytes - ? WHERE number = ?",
            (exact_json.dumps(failed), gone, number),
        )
        less.append((owner, gone))
    return again, less
