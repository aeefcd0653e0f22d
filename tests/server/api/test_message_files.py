"""Files in messages: those that come with a request, and those that are kept, in every API that has messages."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from longreach.api.generation.message_files import MAX_FILES
from longreach.documents.document import Document, NewDocument
from longreach.text.tokenizer import Tokenizer

from tests.server.api.anthropic_client import TEMPLATE
from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import prompt_of

OWL = "Grüße: the owl's key is 4071."
IN_A_MESSAGE = f'<document name="owl.md">\n{OWL}\n</document>'
DATA_URL = "data:text/markdown;base64," + base64.b64encode(OWL.encode()).decode()
TEXT = {"type": "text", "text": "Which?"}

Parts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, max_model_len=4096) as server:
        yield server


@pytest.fixture(scope="module")
def kept(live: LiveServer) -> Document:
    """A file that is kept; without keys it is everybody's."""
    return keep(live, OWL.encode(), name="owl.md")


def keep(live: LiveServer, contents: bytes, **new: Any) -> Document:
    wanted = NewDocument(**{"kind": "text", "use": "chat", **new})
    putting = live.service.documents.put("", wanted, contents)
    return asyncio.run_coroutine_threadsafe(putting, live.loop).result(20)[0]


def chat(live: LiveServer, parts: Parts) -> httpx2.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    return live.http.post("/v1/chat/completions", json=body)


def response(live: LiveServer, parts: Parts) -> httpx2.Response:
    typed = [{**part, "type": part["type"].replace("text", "input_text")} for part in parts]
    body = {"model": MODEL, "input": [{"role": "user", "content": typed}], "max_output_tokens": 1}
    return live.http.post("/v1/responses", json=body)


def message(live: LiveServer, parts: Parts) -> httpx2.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    return live.http.post("/v1/messages", json=body)


def of_chat(**members: str) -> dict[str, Any]:
    return {"type": "file", "file": members}


def of_response(**members: str) -> dict[str, Any]:
    return {"type": "input_file", **members}


def of_message(*, title: str | None = None, **source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **({} if title is None else {"title": title})}


def test_a_file_is_written_in_one_way_whichever_api_it_comes_through(
    live: LiveServer, kept: Document, tokenizer: Tokenizer
) -> None:
    file_id = kept.id.replace("doc-", "file-")
    ways = [
        (chat, of_chat(file_id=kept.id)),
        (chat, of_chat(file_id=file_id)),
        (chat, of_chat(file_data=DATA_URL, filename="owl.md")),
        (chat, of_chat(file_data=DATA_URL.partition(",")[2], filename="owl.md")),
        (response, of_response(file_id=file_id)),
        (response, of_response(file_data=DATA_URL, filename="owl.md")),
        (message, of_message(type="file", file_id=kept.id)),
        (message, of_message(type="text", media_type="text/plain", data=OWL, title="owl.md")),
        (message, of_message(type="content", content=[{"type": "text", "text": OWL}], title="owl.md")),
    ]
    for send, part in ways:
        answer = send(live, [part, TEXT])
        assert answer.status_code == 200, answer.text
        prompt = prompt_of(live, tokenizer)
        assert prompt == f"<|im_start|>user\n{IN_A_MESSAGE}\nWhich?<|im_end|>\n<|im_start|>assistant\n", part


def test_a_title_of_a_kept_file_leaves_the_beginning_of_the_prompt_as_it_is(
    live: LiveServer, kept: Document, tokenizer: Tokenizer
) -> None:
    part = {**of_message(type="file", file_id=kept.id, title="A title"), "context": "A context"}
    assert message(live, [part, TEXT]).status_code == 200
    behind = "\n<title>A title</title>\n<context>\nA context\n</context>\nWhich?"
    assert f"user\n{IN_A_MESSAGE}{behind}<|im_end|>" in prompt_of(live, tokenizer)


def test_files_stand_where_they_are_named_as_often_as_they_are(
    live: LiveServer, kept: Document, tokenizer: Tokenizer
) -> None:
    named = of_chat(file_id=kept.id)
    system = {"role": "system", "content": [named]}
    body = {"model": MODEL, "messages": [system, {"role": "user", "content": [TEXT, named, named]}], "max_tokens": 1}
    assert live.http.post("/v1/chat/completions", json=body).status_code == 200
    prompt = prompt_of(live, tokenizer)
    assert f"<|im_start|>system\n{IN_A_MESSAGE}<|im_end|>" in prompt
    assert f"<|im_start|>user\nWhich?\n{IN_A_MESSAGE}\n{IN_A_MESSAGE}<|im_end|>" in prompt


def test_the_result_of_a_tool_may_have_a_file(live: LiveServer, kept: Document, tokenizer: Tokenizer) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [of_response(file_id=kept.id)]}
    body = {"model": MODEL, "input": [{"role": "user", "content": "Read"}, call, output], "max_output_tokens": 1}
    assert live.http.post("/v1/responses", json=body).status_code == 200
    assert f"<|im_start|>tool\n{IN_A_MESSAGE}<|im_end|>" in prompt_of(live, tokenizer)


def test_a_kept_response_keeps_the_name_of_its_file_and_not_its_text(
    live: LiveServer, kept: Document, tokenizer: Tokenizer
) -> None:
    first = response(live, [of_response(file_id=kept.id), TEXT]).json()
    listed = live.http.get(f"/v1/responses/{first['id']}/input_items").json()["data"][0]
    assert listed["content"][0] == {"type": "input_file", "file_id": kept.id}
    body = {"model": MODEL, "previous_response_id": first["id"], "input": "And?", "max_output_tokens": 1}
    assert live.http.post("/v1/responses", json=body).status_code == 200
    assert prompt_of(live, tokenizer).startswith(f"<|im_start|>user\n{IN_A_MESSAGE}\nWhich?<|im_end|>")


def test_tokens_are_counted_with_the_files(live: LiveServer, kept: Document) -> None:
    content = [of_message(type="file", file_id=kept.id), TEXT]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    counted = live.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert message(live, content).json()["usage"]["input_tokens"] == counted
    items = [{"role": "user", "content": [of_response(file_id=kept.id), {"type": "input_text", "text": "Which?"}]}]
    assert live.http.post("/v1/responses/input_tokens", json={"input": items}).json()["input_tokens"] == counted


def test_a_use_is_counted(live: LiveServer) -> None:
    document = keep(live, b"Another.", name="b.txt")
    chat(live, [of_chat(file_id=document.id), TEXT])
    getting = live.service.documents.get("", document.id)
    assert asyncio.run_coroutine_threadsafe(getting, live.loop).result(20).uses == 1


def test_what_cannot_be_put_in_is_refused_and_reaches_no_engine(live: LiveServer, kept: Document) -> None:
    ids = keep(live, b"\1\0\0\0", kind="tokens")
    long = keep(live, b"The owl. " * 6000, name="long.txt")
    refused: list[tuple[Callable[..., httpx2.Response], Parts, int, str, str]] = [
        (chat, [of_chat(file_id="file-none")], 404, "messages", "document_not_found"),
        (message, [of_message(type="file", file_id="file-none")], 404, "messages", "document_not_found"),
        (response, [of_response(file_id="file-none")], 404, "input", "document_not_found"),
        (chat, [of_chat(file_id=ids.id)], 400, "messages", "unsupported_value"),
        (chat, [of_chat(file_id=long.id)], 400, "messages", "context_length_exceeded"),
        (chat, [of_chat(file_id=long.id)] * 999, 400, "messages", "context_length_exceeded"),
        (chat, [of_chat(file_id=f"file-{n}") for n in range(MAX_FILES + 1)], 400, "messages", "unsupported_value"),
        (
            chat,
            [of_chat(file_data="data:image/png;base64,")],
            400,
            "messages.0.content.0.file",
            "unsupported_file",
        ),
        (chat, [of_chat(file_data="?")], 400, "messages.0.content.0.file", "invalid_value"),
        (chat, [of_chat()], 400, "messages.0.content.0.file", "missing_required_parameter"),
        (chat, [of_chat(file_url="x")], 400, "messages.0.content.0.file", "unknown_parameter"),
        (response, [of_response(file_url="http://a.b/c")], 400, "input.0.content.0", "unsupported_value"),
    ]
    before = len(live.engine.requests)
    for send, parts, status, param, code in refused:
        answer = send(live, parts)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code), answer.text
    assert len(live.engine.requests) == before
    error = chat(live, [of_chat(file_id=long.id)] * 999).json()["error"]
    assert "the files in them have 53946000 bytes together" in error["message"], "before any of it is in memory"


def test_where_nothing_is_kept_a_file_comes_with_the_request(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer
) -> None:
    with make_server(template=TEMPLATE, documents="none") as server:
        error = chat(server, [of_chat(file_id="file-1")]).json()["error"]
        assert "send the file itself (`file_data`), or start the server with --documents memory" in error["message"]
        assert chat(server, [of_chat(file_data=DATA_URL, filename="owl.md"), TEXT]).status_code == 200
        assert IN_A_MESSAGE in prompt_of(server, tokenizer)
