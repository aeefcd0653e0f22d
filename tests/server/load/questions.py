"""Documents, questions about them, and how a server is asked: by whole prompts, and by documents that are uploaded."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

from longreach.config import EMBEDDED_MODEL_NAME

from tests.server.load.process import ServerProcess

_PARTS = 10  # in which an upload comes
_QUESTIONS = ("\nHow many crates on the first day?", "\nWhat does the ledger list?")


def document(number: int) -> str:
    """About 700 tokens; documents of one parity begin alike."""
    lines = [
        f"The ledger of {'summer' if number % 2 else 'winter'} day {day} lists {day * 37 % 101} crates.\n"
        for day in range(11)
    ]
    return "".join(lines) + "".join(
        f"Crate {crate} of list {number} weighs {crate * number % 97}.\n" for crate in range(22)
    )


class Questions:
    """Everything that may be asked.

    Attributes:
        prompts: whole prompts: a document and a question.
        uploaded: texts that are uploaded, and then asked about.
    """

    def __init__(self, prompts: int = 8, uploads: int = 4) -> None:
        self.prompts = [document(number) + question for number in range(prompts) for question in _QUESTIONS]
        self.uploaded = [document(number) for number in range(100, 100 + uploads)]

    def ask(self, port: int, prompt: str) -> tuple[str, dict[str, Any]]:
        """A greedy answer, and its usage.

        Raises:
            OSError, http.client.HTTPException, ValueError: there was none.
        """
        return _ask(port, {"prompt": prompt})

    def ask_uploaded(self, port: int, text: str, slowly: float = 0.0) -> tuple[str, dict[str, Any]]:
        """Upload a text over so many seconds, ask about it, and let go of it: as `ask`."""
        parts = [text[at : at + len(text) // _PARTS + 1] for at in range(0, len(text), len(text) // _PARTS + 1)]

        def coming() -> Iterator[bytes]:
            for part in parts:
                time.sleep(slowly / len(parts))
                yield part.encode()

        headers = {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"}
        kept = _call(port, "POST", "/v1/documents?use=completion", coming(), headers)
        answer = _ask(port, {"prompt": _QUESTIONS[0], "document": kept["id"]})
        _call(port, "DELETE", f"/v1/documents/{kept['id']}")
        return answer


def plain_answers(questions: Questions) -> dict[str, str]:
    """The answer to each question from a server that caches nothing."""
    with ServerProcess("--no-prefix-cache") as server:
        server.until_ready(900)
        found = {prompt: questions.ask(server.port, prompt)[0] for prompt in questions.prompts}
        return found | {text: questions.ask_uploaded(server.port, text)[0] for text in questions.uploaded}


def _ask(port: int, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body = {"model": EMBEDDED_MODEL_NAME, "max_tokens": 16, "temperature": 0, "return_cache_usage": True} | fields
    headers = {"Content-Type": "application/json"}
    answer = _call(port, "POST", "/v1/completions", json.dumps(body).encode(), headers)
    return answer["choices"][0]["text"], answer["usage"]


def _call(
    port: int,
    method: str,
    path: str,
    body: bytes | Iterator[bytes] | None = None,
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    with contextlib.closing(connection):
        coming = headers is not None and "Transfer-Encoding" in headers
        connection.request(method, path, body, headers or {}, encode_chunked=coming)
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status not in (200, 201):
            raise ValueError(f"status {response.status}: {answer}")
        return answer
