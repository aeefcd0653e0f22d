"""What a request asks of tokens: ids that are told, prompts that are cut, words and tokens that may not come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.api.generation.logprob_objects import token_text
from longreach.engine.messages import Generate
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import TEMPLATE, says
from tests.server.api.told import error_of
from tests.server.conftest import BOS, EOS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BOS_ID = 0


@pytest.fixture
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as server:
        yield server


def post(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "The owl"}
    answer = server.http.post(path, json={"model": MODEL, "max_tokens": 50, "seed": 1, **asked, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: LiveServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "The owl"}
    body = {"model": MODEL, "max_tokens": 50, "seed": 1, "stream": True, **asked, **fields}
    text = server.http.post(path, json=body).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def refused(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "The owl"}
    answer = server.http.post(path, json={"model": MODEL, **asked, **fields})
    return error_of(answer, 400, answer.json()["error"]["code"])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ids_of_prompt_and_answer_are_told_whole_and_in_a_stream(
    live: LiveServer, tokenizer: Tokenizer, path: str, n: int
) -> None:
    says(live, tokenizer, "Grüße 🦉, <think>so</think> said 日本")
    for more in ({}, {"stop": ["said"]}, {"max_tokens": 3}):
        whole = post(live, path, return_token_ids=True, n=n, **more)
        request = live.engine.requests[-1]
        for choice in whole["choices"]:
            ids = live.engine.answer(request)
            expected = ids[:3] if more == {"max_tokens": 3} else [*ids, 1]
            if "stop" in more:
                assert choice["token_ids"] == ids[: len(choice["token_ids"])]
                assert tokenizer.encode_here("said", special=False)[-1] in choice["token_ids"]
            else:
                assert choice["token_ids"] == expected
        prompts = (
            [c["prompt_token_ids"] for c in whole["choices"]] if path == COMPLETIONS else [whole["prompt_token_ids"]]
        )
        assert all(ids == request.prompt for ids in prompts)
        streamed = chunks(live, path, return_token_ids=True, n=n, **more)
        for choice in whole["choices"]:
            same = [c for chunk in streamed for c in chunk["choices"] if c["index"] == choice["index"]]
            assert [token for c in same for token in c["token_ids"]] == choice["token_ids"]
        told = [c for chunk in streamed for c in [chunk, *chunk["choices"]] if "prompt_token_ids" in c]
        assert [c["prompt_token_ids"] for c in told] == [request.prompt] * (1 if path == CHAT else n)


def test_ids_are_told_only_if_asked_for(live: LiveServer) -> None:
    for path in (CHAT, COMPLETIONS):
        assert "token_ids" not in json.dumps(post(live, path, return_token_ids=None))
        assert "token_ids" not in json.dumps(chunks(live, path))


def test_logprobs_may_name_tokens_by_their_ids(live: LiveServer) -> None:
    found = post(live, COMPLETIONS, logprobs=2, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    ids = [token for token in live.engine.requests[-1].prompt if token]
    assert found["tokens"][: len(ids)] == [f"token_id:{token}" for token in ids]
    assert all(name.startswith("token_id:") for top in found["top_logprobs"] for name in top)
    plain = post(live, CHAT, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    named = post(live, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    content = named["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in content] == [one["bytes"] for one in plain]
    assert all(one["token"].startswith("token_id:") for token in content for one in [token, *token["top_logprobs"]])


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompts_logprobs_have_vllms_form(live: LiveServer, tokenizer: Tokenizer, path: str, top: int) -> None:
    whole = post(live, path, prompt_logprobs=top, n=2)
    prompt = live.engine.requests[-1].prompt
    places = [whole] if path == CHAT else whole["choices"]
    assert len(places) == (1 if path == CHAT else 2)
    for place in places:
        first, *rest = place["prompt_logprobs"]
        assert first is None
        assert len(rest) == len(prompt) - 1
        for token, told in zip(prompt[1:], rest, strict=True):
            assert len(told) == max(top, 1)
            own = told[str(token)]
            assert own["logprob"] == pytest.approx(-token / 100)
            assert own["rank"] == (1 if top else None)
            assert own["decoded_token"] == token_text(tokenizer.token_bytes(token))
    assert "prompt_logprobs" not in json.dumps(post(live, path))
    assert "`prompt_logprobs`" in refused(live, path, prompt_logprobs=0, stream=True)["message"]


def test_prompt_logprobs_beside_an_echo_keep_their_own_number(live: LiveServer) -> None:
    choice = post(live, COMPLETIONS, prompt_logprobs=1, logprobs=3, echo=True)["choices"][0]
    assert live.engine.requests[-1].prompt_logprobs == 3
    assert len(choice["prompt_logprobs"][1]) == 1
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3
    assert choice["text"].startswith("The owl")
    assert len(post(live, COMPLETIONS, prompt_logprobs=3, echo=True)["choices"][0]["prompt_logprobs"][1]) == 3


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_is_cut_to_its_last_tokens(make_server: Callable[..., LiveServer], path: str) -> None:
    with make_server(template=TEMPLATE, max_model_len=64) as server:
        words = "owl river " * 200
        long: dict[str, Any] = (
            {"prompt": words} if path == COMPLETIONS else {"messages": [{"role": "user", "content": words}]}
        )
        assert refused(server, path, **long)["code"] == "context_length_exceeded"
        post(server, path, **long, truncate_prompt_tokens=9, max_tokens=5)
        nine = server.engine.requests[-1].prompt
        assert len(nine) == 9
        post(server, path, **long, truncate_prompt_tokens=-1, max_tokens=5)
        most = server.engine.requests[-1].prompt
        assert len(most) == 64 - 5
        assert most[-9:] == nine
        post(server, path, truncate_prompt_tokens=60, max_tokens=2)
        assert len(server.engine.requests[-1].prompt) <= 60
        assert refused(server, path, **long, truncate_prompt_tokens=64)["code"] == "context_length_exceeded"


def test_token_ids_are_cut_too_however_many_they_are(live: LiveServer) -> None:
    ids = [5, 6, 7] * 40_000
    body = {"prompt": ids, "truncate_prompt_tokens": 4, "max_tokens": 1, "echo": True}
    choice = post(live, COMPLETIONS, **body)["choices"][0]
    assert live.engine.requests[-1].prompt == [7, 5, 6, 7]
    assert len(choice["text"]) < 30
    assert refused(live, COMPLETIONS, prompt=ids)["code"] == "context_length_exceeded"


def test_special_tokens_are_put_around_a_prompt_as_asked(live: LiveServer) -> None:
    for path, usual in ((COMPLETIONS, True), (CHAT, False)):
        for asked in (None, True, False):
            post(live, path, add_special_tokens=asked)
            begins = live.engine.requests[-1].prompt[0] == BOS_ID
            assert begins == (usual if asked is None else asked), (path, asked)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_special_tokens_of_an_answer_are_text_if_asked_for(live: LiveServer, tokenizer: Tokenizer, path: str) -> None:
    a, b = tokenizer.encode_here("a b", special=False)[0], tokenizer.encode_here(" b", special=False)[-1]
    live.engine.answer = lambda request: [a, BOS_ID, b]
    for stream in (False, True):
        for skip, text in ((False, f"a{BOS}"), (True, "a")):
            fields = (
                {"skip_special_tokens": skip, "guided_regex": "[^x]*"}
                if path == CHAT
                else {"skip_special_tokens": skip}
            )
            if stream:
                pieces = [c for chunk in chunks(live, path, **fields) for c in chunk["choices"]]
                found = "".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c in pieces)
            else:
                found = text_of(post(live, path, **fields)["choices"][0])
            assert found.startswith(text)
            assert (BOS in found) == (not skip)


@pytest.mark.parametrize(
    ("stop", "include", "text", "finish"),
    [
        (BOS, False, "ab", "stop"),
        (BOS, True, f"ab{BOS}", "stop"),
        (f"b{BOS}", False, "a", "stop"),
        (f"b{BOS}", True, f"ab{BOS}", "stop"),
        (f"{BOS}c", False, "ab", "stop"),
        (f"{BOS}c", True, f"ab{BOS}c", "stop"),
        (f"{BOS}d", False, "abcabc", "length"),
        (f"{BOS}{BOS}", False, "abcabc", "length"),
        (EOS, False, "abcabc", "length"),
        ("cab", True, "abcab", "stop"),
    ],
)
def test_a_stop_string_that_names_a_special_token_ends_the_answer(
    live: LiveServer, tokenizer: Tokenizer, stop: str, include: bool, text: str, finish: str
) -> None:
    a, b, c = (tokenizer.encode_here(letter, special=False)[0] for letter in "abc")
    live.engine.answer = lambda request: [a, b, BOS_ID, c, a, b, BOS_ID, c]
    fields = {"stop": [stop, "never"], "include_stop_str_in_output": include, "max_tokens": 8}
    for path in (COMPLETIONS, CHAT):
        more: dict[str, Any] = {"guided_regex": "[^x]*"} if path == CHAT else {"logprobs": 0}
        choice = post(live, path, **fields, **more)["choices"][0]
        assert (text_of(choice), choice["finish_reason"]) == (text, finish)
        pieces = [c for chunk in chunks(live, path, **fields, **more) for c in chunk["choices"]]
        assert "".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c in pieces) == text
        if path == COMPLETIONS:
            assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
            assert [c["text"] for c in pieces if c["finish_reason"]] != []


def test_words_and_tokens_that_may_come_reach_the_engine(live: LiveServer, tokenizer: Tokenizer) -> None:
    post(live, COMPLETIONS, allowed_token_ids=[7, 5])
    assert live.engine.requests[-1].sampling.allowed_token_ids == [7, 5]
    post(live, CHAT, bad_words=["owl", "silver lantern", " x"], n=2)
    for request in live.engine.requests[-2:]:
        words = request.sampling.bad_words
        assert tokenizer.encode_here("owl", special=False) in words
        assert tokenizer.encode_here(" owl", special=False) in words
        assert tokenizer.encode_here("silver lantern", special=False) in words
        assert tokenizer.encode_here("x", special=False) in words
        assert all(words)
    for fields in ({"allowed_token_ids": None}, {"bad_words": []}, {"bad_words": None}):
        post(live, COMPLETIONS, **fields)
        sampling = live.engine.requests[-1].sampling
        assert (sampling.allowed_token_ids, sampling.bad_words) == ([], [])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [5], "regex": "a"}, "allowed_token_ids"),
        ({"bad_words": ["a"], "response_format": {"type": "json_object"}}, "bad_words"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "min_tokens": 2}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 5], "stop_token_ids": [5], "min_tokens": 2}, "allowed_token_ids"),
    ],
)
def test_what_may_leave_nothing_to_be_drawn_is_refused(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert refused(live, COMPLETIONS, **fields)["param"] == param
    assert not live.engine.requests


def test_an_answer_may_have_whatever_the_context_has_left(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE, max_model_len=64) as server:
        for path in (CHAT, COMPLETIONS):
            for fields in ({"max_tokens": -1}, {"max_tokens": None, "n_predict": -1}, {"max_tokens": -1.0}):
                post(server, path, **fields)
                request = server.engine.requests[-1]
                assert request.max_tokens == 64 - len(request.prompt)
            post(server, path, max_tokens=None, n_predict=3)
            assert server.engine.requests[-1].max_tokens == 3
            post(server, path, max_tokens=2, n_predict=3)
            assert server.engine.requests[-1].max_tokens == 2
        post(server, CHAT, max_completion_tokens=4, max_tokens=-1)
        assert server.engine.requests[-1].max_tokens == 4
        post(server, COMPLETIONS, prompt=["a", "The owl and the family"], max_tokens=-1)
        assert {request.max_tokens + len(request.prompt) for request in server.engine.requests[-2:]} == {64}
        post(server, COMPLETIONS, max_tokens=None)
        assert server.engine.requests[-1].max_tokens == 16


def test_an_answer_has_the_id_that_its_request_asks_for_and_the_engine_one_of_its_own(live: LiveServer) -> None:
    for path, prefix in ((CHAT, "chatcmpl-"), (COMPLETIONS, "cmpl-")):
        assert {post(live, path, request_id="mine:1")["id"] for _ in range(2)} == {f"{prefix}mine:1"}
        assert {chunk["id"] for chunk in chunks(live, path, request_id="mine:1")} == {f"{prefix}mine:1"}
        assert post(live, path)["id"] != post(live, path)["id"]
    assert post(live, CHAT, rid="theirs")["id"] == "chatcmpl-theirs"
    assert post(live, CHAT, rid="theirs", request_id="mine")["id"] == "chatcmpl-mine"
    names = [request.request_id for request in live.engine.requests]
    assert len(names) == len(set(names))


def test_the_places_of_an_echo_stand_behind_its_special_tokens(live: LiveServer, tokenizer: Tokenizer) -> None:
    for text in (f"{EOS}Hi{BOS} there{EOS}", "The owl 🦉 said", f"Grüße{BOS}"):
        fields: dict[str, Any] = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}
        found = post(live, COMPLETIONS, **fields)["choices"][0]
        places, tokens = found["logprobs"]["text_offset"], found["logprobs"]["tokens"]
        assert found["text"] == text
        assert (tokens[0], places[0]) == (BOS, 0)  # the tokenizer's own, which is not in the text
        assert places[1] == 0
        for place, token in [*zip(places, tokens, strict=True)][1:]:
            assert token.startswith("bytes:") or text.startswith(token, place), (place, token)
        streamed = chunks(live, COMPLETIONS, **fields)
        assert [p for chunk in streamed for c in chunk["choices"] for p in c["logprobs"]["text_offset"]] == places
        ids = live.engine.requests[-1].prompt
        of_ids = post(live, COMPLETIONS, **{**fields, "prompt": ids})["choices"][0]
        bare = of_ids["text"]
        for place, token in zip(of_ids["logprobs"]["text_offset"], of_ids["logprobs"]["tokens"], strict=True):
            assert token in (BOS, EOS) or token.startswith("bytes:") or bare.startswith(token, place)


def test_an_answer_behind_an_echo_begins_where_the_prompt_ends(live: LiveServer) -> None:
    text = f"Hi{EOS}"
    found = post(live, COMPLETIONS, prompt=text, echo=True, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert found["text_offset"][-1] == len(text)


def test_a_generate_without_them_is_what_it_was() -> None:
    sampling = Generate(request_id="a", prompt=[1], max_tokens=1).sampling
    assert (sampling.allowed_token_ids, sampling.bad_words, sampling.looks_back) == ([], [], False)
