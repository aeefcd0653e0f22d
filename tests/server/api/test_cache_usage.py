"""`return_cache_usage`: what came from which cache, and where a prompt parts from the caller's recent ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import TEMPLATE, WEATHER

STANDING = "You are a careful assistant of the harbour office."


@pytest.fixture
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as server:
        yield server


def ask(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    """The usage of an answer."""
    body = {"model": MODEL, "max_tokens": 2, "return_cache_usage": True, **fields}
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    response = server.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]


def chat(header: str, question: str = "When is high tide?") -> list[dict[str, Any]]:
    return [{"role": "system", "content": f"{header}{STANDING}"}, {"role": "user", "content": question}]


def headed(path: str, header: str) -> dict[str, Any]:
    """A conversation whose system prompt begins with `header`, in the form of an endpoint."""
    system, user = chat(header)
    if path == "chat/completions":
        return {"messages": [system, user]}
    if path == "responses":
        return {"instructions": system["content"], "input": user["content"]}
    return {"system": system["content"], "messages": [user]}


def test_nothing_is_told_of_other_prompts_behind_a_proxy(live: LiveServer) -> None:
    """All who are behind it have one address; a salt tells them apart."""
    live.http.headers["X-Forwarded-For"] = "192.0.2.7"
    for header, salt in (("Now it is 12:30. ", None), ("Now it is 12:31. ", None), ("1", "mine"), ("2", "mine")):
        cache = ask(live, "chat/completions", messages=chat(header), cache_salt=salt)["cache"]
        if header == "Now it is 12:31. ":
            assert "12:31" in cache["parted"]["now"]
            assert cache["parted"]["before"] is None
    assert STANDING[:5] in cache["parted"]["before"]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_header_that_changes_is_seen_in_one_look(live: LiveServer, path: str) -> None:
    first = ask(live, path, **headed(path, "Now it is 12:30. "))["cache"]
    assert first == {"cached_tokens": 0, "gpu": 0, "host": 0, "disk": 0, "seen": 0, "parted": None}
    cache = ask(live, path, **headed(path, "Now it is 12:31. "))["cache"]
    parted = cache["parted"]
    text = "<|im_start|>system\nNow it is 12:31. "
    assert (parted["message"], parted["role"], parted["field"]) == (0, "system", "content")
    assert parted["character"] == text.index("1. ")
    assert parted["token"] == cache["seen"] > 0
    assert "12:31. You are" in parted["now"]
    assert "12:30. You are" in parted["before"]
    assert STANDING not in parted["before"], "only a few characters are told"


def test_completions_have_characters_of_the_prompt(server: LiveServer) -> None:
    ask(server, "completions", prompt="The owl sleeps by day")
    parted = ask(server, "completions", prompt="The owl sings by night")["cache"]["parted"]
    assert (parted["message"], parted["field"], parted["character"]) == (None, "prompt", len("The owl s"))
    assert (parted["now"], parted["before"][:14]) == ("The owl sings by night", "The owl sleeps")


def test_token_ids_are_compared_as_well(server: LiveServer) -> None:
    ask(server, "completions", prompt=[40, 41, 42, 43])
    cache = ask(server, "completions", prompt=[40, 41, 50, 43])["cache"]
    assert (cache["seen"], cache["parted"]["token"], cache["parted"]["field"]) == (2, 2, "prompt")


def test_a_prompt_that_is_seen_whole_parts_nowhere(server: LiveServer) -> None:
    ask(server, "completions", prompt="The owl sleeps by day")
    for prompt in ("The owl sleeps by day", "The owl sleeps"):
        cache = ask(server, "completions", prompt=prompt)["cache"]
        assert cache["parted"] is None
        assert cache["seen"] > 0


def test_a_prompt_that_goes_on_parts_where_the_answer_before_it_ends(live: LiveServer) -> None:
    """The answer's tokens are in the cache, too: a turn that quotes the answer as it was parts behind it."""
    live.engine.answer = lambda _: live.service.require_ready()[1].encode_here("At noon.", special=False)
    first = chat("")
    usage = ask(live, "chat/completions", max_tokens=100, messages=first)
    more = [*first, {"role": "assistant", "content": "At noon."}, {"role": "user", "content": "And low tide?"}]
    cache = ask(live, "chat/completions", max_tokens=100, messages=more)["cache"]
    assert cache["seen"] >= usage["prompt_tokens"] + usage["completion_tokens"] - 1
    changed = [*first, {"role": "assistant", "content": "At one."}, {"role": "user", "content": "And low tide?"}]
    parted = ask(live, "chat/completions", messages=changed)["cache"]["parted"]
    assert (parted["message"], parted["role"], parted["field"]) == (2, "assistant", "content")
    assert "At one." in parted["now"]
    assert "At noon." in parted["before"]


def test_what_the_template_writes_is_told_as_such(live: LiveServer) -> None:
    ask(live, "chat/completions", messages=chat(""))
    other = [{"role": "system", "content": STANDING}, {"role": "assistant", "content": "When is high tide?"}]
    parted = ask(live, "chat/completions", messages=other)["cache"]["parted"]
    assert (parted["message"], parted["role"], parted["field"]) == (1, "assistant", "template")
    ask(live, "chat/completions", messages=chat(""), tools=[WEATHER])
    renamed = {"type": "function", "function": {**WEATHER["function"], "name": "get_tides"}}
    parted = ask(live, "chat/completions", messages=chat(""), tools=[renamed])["cache"]["parted"]
    assert (parted["message"], parted["field"]) == (None, "tools")


def test_a_template_that_changes_texts_leaves_the_place_open(make_server: Callable[..., LiveServer]) -> None:
    template = "{% for message in messages %}{{ message.content | length }}{{ message.content }}\n{% endfor %}"
    with make_server(template=template) as server:
        ask(server, "chat/completions", messages=chat("1 "))
        parted = ask(server, "chat/completions", messages=chat("2 "))["cache"]["parted"]
        assert (parted["message"], parted["field"]) == (None, None)
        assert "2 You are" in parted["now"]


def test_a_character_of_several_tokens_is_told_whole(server: LiveServer) -> None:
    ask(server, "completions", prompt="The price is 5 € today")
    parted = ask(server, "completions", prompt="The price is 5 ₤ today")["cache"]["parted"]
    assert parted["character"] == len("The price is 5 ")
    assert parted["now"] == "The price is 5 ₤ today"
    assert "5 € today" in parted["before"]


def test_nobody_is_told_of_another(make_server: Callable[..., LiveServer], server: LiveServer) -> None:
    ask(server, "completions", prompt="My secret is sesame", cache_salt="mine")
    assert ask(server, "completions", prompt="My secret is s", cache_salt="yours")["cache"]["seen"] == 0
    assert ask(server, "completions", prompt="My secret is s")["cache"]["seen"] == 0
    assert ask(server, "completions", prompt="My secret is s", attention="window:64")["cache"]["seen"] == 0
    with make_server(api_key="alice:alices-key-0001,bob:bobs-key-0001") as keyed:
        seen = []
        for key in ("alices-key-0001", "bobs-key-0001", "alices-key-0001"):
            keyed.http.headers["authorization"] = f"Bearer {key}"
            seen.append(ask(keyed, "completions", prompt="My secret is sesame")["cache"]["seen"])
        assert [count > 0 for count in seen] == [False, False, True]


def test_tiers_are_told_apart(server: LiveServer) -> None:
    server.engine.cached, server.engine.tiers = 6, (2, 1)
    cache = ask(server, "completions", prompt="The owl sleeps by day")["cache"]
    assert (cache["cached_tokens"], cache["gpu"], cache["host"], cache["disk"]) == (6, 3, 2, 1)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_nobody_is_told_who_does_not_ask(live: LiveServer, path: str) -> None:
    fields = {"prompt": "The owl"} if path == "completions" else headed(path, "")
    assert "cache" not in ask(live, path, return_cache_usage=False, **fields)
    assert ask(live, path, **fields)["cache"]["seen"] > 0, "what nobody asked about is compared with"


def test_streams_have_it_with_their_usage(live: LiveServer) -> None:
    ask(live, "chat/completions", messages=chat("1 "))
    body = {"model": MODEL, "max_tokens": 2, "return_cache_usage": True, "messages": chat("2 "), "stream": True}
    body["stream_options"] = {"include_usage": True}
    lines = live.http.post("/v1/chat/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["usage"]["cache"]["parted"]["message"] == 0


def test_background_responses_have_it(live: LiveServer) -> None:
    ask(live, "responses", **headed("responses", "1 "))
    body = {"model": MODEL, "max_output_tokens": 2, "return_cache_usage": True, **headed("responses", "2 ")}
    lines = live.http.post("/v1/responses", json={**body, "background": True, "stream": True}).text.splitlines()
    last = json.loads([line[6:] for line in lines if line.startswith("data: {")][-1])
    assert last["response"]["usage"]["cache"]["parted"]["message"] == 0


def test_the_log_has_the_place_and_no_text(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="longreach.requests"):
        ask(live, "chat/completions", messages=chat("Code 4711. "))
        ask(live, "chat/completions", messages=chat("Code 4712. "))
    lines = [record.getMessage() for record in caplog.records if "prompt=" in record.getMessage()]
    assert "host=0 disk=0 seen=0 " in lines[0]
    assert " parted=" in lines[1]
    assert " message=0 field=content " in lines[1]
    assert "471" not in lines[1]
