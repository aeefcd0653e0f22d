"""`return_places`: what of the prompt the sentences of an answer attended to, in characters of the caller's texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from longreach.engine.messages import Generate
from longreach.engine.updates import AttendedBlocks
from longreach.text.sentences import excerpt, sentences

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import TEMPLATE
from tests.server.api.test_documents import upload

FACT = "Der Schlüssel der Müllerin hängt am 🗝️-Brett, drei Ellen über der Tür."
OTHER = "The ferry to Kråkøy leaves at seven, from the second pier on the left."
LONG = "\n".join(["Nothing is said of it here, at least not much."] * 12)
TEXT = f"{LONG}\n{FACT}\n{LONG}\n{OTHER}\n{LONG}"
ANSWER = "It hangs by the door. Take the ferry."


@pytest.fixture
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as server:
        answering(server)
        yield server


def answering(server: LiveServer) -> None:
    """The first sentence of the answer attends to FACT, and the second one to OTHER."""
    tokenizer = server.service.require_ready()[1]
    answer = tokenizer.encode_here(ANSWER, special=False)
    first = len(tokenizer.encode_here(ANSWER[: ANSWER.index(" Take")], special=False))
    server.engine.answer = lambda _: answer

    def attends(request: Generate, count: int) -> AttendedBlocks:
        ids = [tokenizer.encode_here(text, special=False)[2:14] for text in (FACT, OTHER)]
        wanted = ids[0 if count <= first else 1]
        at = next(i for i in range(len(request.prompt)) if request.prompt[i : i + len(wanted)] == wanted)
        return AttendedBlocks([at // 16, 3], [0.5, 0.01])

    server.engine.attends = attends


def ask(server: LiveServer, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    """The usage of an answer, or an error."""
    body = {"model": MODEL, "max_tokens": 100, "return_places": True, **fields}
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    response = server.http.post(f"/v1/{path}", json=body)
    assert response.status_code == status, response.text
    found = response.json()
    return found["usage"] if status == 200 else found["error"]


def check(found: list[dict[str, Any]], text: str, **wanted: Any) -> None:
    """Both sentences have their place, at its offset in `text`."""
    assert [one["sentence"] for one in found] == ["It hangs by the door.", "Take the ferry."]
    for one, fact in zip(found, (FACT, OTHER), strict=True):
        [place] = one["places"]  # what has less than a twentieth of the scores is none
        assert fact in place["text"]
        assert len(place["text"]) <= 200
        assert text[place["offset"] :][: place["end"] - place["start"]] == place["text"]
        assert {name: place[name] for name in wanted} == wanted
        assert place["weight"] == pytest.approx(0.98, abs=0.001)


def test_characters_of_a_prompt(live: LiveServer) -> None:
    found = ask(live, "completions", prompt=TEXT)["places"]
    check(found, TEXT, field="prompt", message=None, document=None)
    assert TEXT[found[0]["places"][0]["start"] : found[0]["places"][0]["end"]] == found[0]["places"][0]["text"]
    as_ids = ask(live, "completions", prompt=live.engine.requests[-1].prompt)["places"]
    check(as_ids, TEXT, field="prompt")


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_characters_of_a_message(live: LiveServer, path: str) -> None:
    content = f" \n{TEXT}"
    user = {"role": "user", "content": content}
    if path == "responses":
        fields: dict[str, Any] = {"instructions": "Be brief.", "input": [user]}
    elif path == "messages":
        fields = {"system": "Be brief.", "messages": [user]}
    else:
        fields = {"messages": [{"role": "system", "content": "Be brief."}, user]}
    check(ask(live, path, **fields)["places"], content, field="content", message=1, role="user")


def test_a_template_may_strip_and_may_change_texts(make_server: Callable[..., LiveServer]) -> None:
    messages = [{"role": "user", "content": f"  {TEXT}  "}]
    with make_server(template="{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}") as server:
        answering(server)
        check(ask(server, "chat/completions", messages=messages)["places"], f"  {TEXT}", field="content", message=0)
    with make_server(template="{% for m in messages %}{{ m.content[:10] }}{{ m.content }}{% endfor %}") as server:
        answering(server)
        [first, _] = ask(server, "chat/completions", messages=messages)["places"]
        [place] = first["places"]
        assert FACT in place["text"]
        assert place["field"] is place["offset"] is place["message"] is None


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_characters_of_a_kept_document(live: LiveServer, path: str) -> None:
    kept = upload(live, text=TEXT, name="ferries")
    asked: dict[str, Any] = {"prompt": "Where?"}
    if path != "completions":
        asked = {"messages": [{"role": "user", "content": "Where?"}]}
    check(ask(live, path, document="ferries", **asked)["places"], TEXT, field="document", document=kept["id"])


def test_what_the_template_writes_is_no_place(live: LiveServer) -> None:
    live.engine.attends = lambda request, count: AttendedBlocks([1], [0.5])
    tool = {"type": "function", "function": {"name": "t", "description": "", "parameters": {"x": "y" * 200}}}
    usage = ask(live, "chat/completions", messages=[{"role": "user", "content": TEXT}], tools=[tool])
    assert [one["places"] for one in usage["places"]] == [[], []]


def test_streams_have_places_of_each_answer_in_their_last_usage(live: LiveServer) -> None:
    live.engine.burst = 3
    body = {"model": MODEL, "max_tokens": 100, "return_places": True, "prompt": TEXT, "stream": True, "n": 2}
    body["stream_options"] = {"include_usage": True}
    lines = live.http.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    found = chunks[-1]["usage"]["places"]
    assert [one["choice"] for one in found] == [0, 0, 1, 1]
    check(found[2:], TEXT, field="prompt")


def test_a_stop_string_ends_the_sentences(live: LiveServer) -> None:
    found = ask(live, "completions", prompt=TEXT, stop=" Take")["places"]
    assert [one["sentence"] for one in found] == ["It hangs by the door."]
    assert FACT in found[0]["places"][0]["text"]


def test_nobody_is_told_who_does_not_ask(live: LiveServer) -> None:
    assert "places" not in ask(live, "completions", prompt=TEXT, return_places=False)
    assert not live.engine.requests[-1].places


def test_what_cannot_be_seen_is_refused(live: LiveServer) -> None:
    for fields in ({"attention": "window:4096"}, {"best_of": 2}):
        error = ask(live, "completions", status=400, prompt=TEXT, **fields)
        assert error["param"] == "return_places"
    live.engine.info = msgspec.structs.replace(live.engine.info, attended_layers=0)
    error = ask(live, "completions", status=400, prompt=TEXT)
    assert "no layer of this model" in error["message"]
    assert not live.engine.requests


def test_sentences_end_at_marks_and_lines() -> None:
    text = 'It is 3.5 m. "Really?" Yes…\n\n- a list\n- of two\n今天。明天！ No end'
    found = [text[start:end] for start, end in sentences(text)]
    assert found == ["It is 3.5 m.", '"Really?"', "Yes…", "- a list", "- of two", "今天。", "明天！", "No end"]
    assert sentences(" \n ") == []


def test_an_excerpt_is_whole_sentences_or_words_and_no_longer_than_it_may_be() -> None:
    text = f"{LONG} {FACT} {OTHER}"
    at = text.index("Müllerin")
    start, end = excerpt(text, at, at + 4, 200)
    assert text[start:end] == FACT
    words = "word " * 100
    start, end = excerpt(words, 202, 257, 200)
    assert (start, end) == (200, 259)
    start, end = excerpt("x" * 1000, 400, 460, 200)
    assert start <= 400
    assert end >= 460
    assert end - start == 200
