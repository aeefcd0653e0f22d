"""Documents through real engines: read ahead, asked, and asked again after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.server.api.conftest import eventually
from tests.server.api.embedded import EmbeddedServer

TEXT = " ".join(f"The pass key of room {number} is {number * 7919 % 9973}." for number in range(260))
QUESTIONS = ("What is the pass key of room 71?", "What is the pass key of room 3?")


def serve(folder: Path) -> EmbeddedServer:
    return EmbeddedServer(
        max_model_len=8192,
        kv_cache_memory="64MiB",
        page_size=32,
        kv_offload_bytes="64MiB",
        kv_disk=folder / "pages",
        kv_disk_bytes="256MiB",
        documents=str(folder / "documents.db"),
    )


def chat(server: EmbeddedServer, document: str, question: str) -> tuple[str, int, int]:
    """The answer, and how many tokens of the prompt were cached, of how many."""
    told: Any = server.openai.chat.completions.create(
        model="longreach-default",
        messages=[{"role": "user", "content": question}],
        max_tokens=8,
        temperature=0,
        extra_body={"document": document},
    )
    usage = told.usage
    return told.choices[0].message.content, usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


def complete(server: EmbeddedServer, document: str, question: str) -> tuple[str, int, int]:
    body = {"model": "longreach-default", "prompt": f"\nQuestion: {question}\nAnswer:", "max_tokens": 8}
    told = server.http.post("/v1/completions", json={**body, "document": document, "temperature": 0}).json()
    usage = told["usage"]
    return told["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def test_a_document_is_read_once_whoever_asks_and_whenever(tmp_path: Path) -> None:
    answers: list[str] = []
    with serve(tmp_path) as server:
        for use in ("chat", "completion"):
            body = {"text": TEXT, "name": use, "use": use, "pin": use == "chat", "wait": True}
            told = server.http.post("/v1/documents", json=body)
            assert told.status_code == 201, told.text
            assert told.json()["state"] == "ready"
            cache = server.http.get(f"/v1/documents/{told.json()['id']}").json()["cache"]
            assert cache["gpu"]["tokens"] >= 0.98 * told.json()["tokens"]
            assert cache["gpu"]["bytes"] > 0
            assert cache["seconds_to_read"] > cache["seconds_to_first_token"]
        for ask, use in ((chat, "chat"), (complete, "completion")):
            for question in QUESTIONS:
                answer, cached, tokens = ask(server, use, question)
                assert cached >= 0.97 * tokens  # the question itself is the rest
                answers.append(answer)
        eventually(
            lambda: (
                'kv_disk_unwritten{engine="0",model_name="longreach-default"} 0.0' in server.http.get("/metrics").text
            )
        )
    with serve(tmp_path) as server:
        assert [one["name"] for one in server.http.get("/v1/documents").json()["data"]] == ["completion", "chat"]
        again: list[str] = []
        for ask, use in ((complete, "completion"), (chat, "chat")):
            for question in QUESTIONS:
                answer, cached, tokens = ask(server, use, question)
                assert cached >= 0.97 * tokens
                again.append(answer)
        assert again == answers[2:] + answers[:2]
