"""However long an answer is, no turn of the event loop builds or encodes much of it: the work of each is counted."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import openai.types.chat
import orjson
import pytest
from longreach.api.generation import plan_answers
from longreach.api.generation.logprob_objects import TokenNames
from longreach.text.detokenizer import Detokenizer
from longreach.util.json_pieces import LONG_BYTES

from tests.server.api.conftest import MODEL, LiveServer

TOKENS = 2_000
# Of a turn: what the encoder gives out in bytes, and tokens that are named or become text.
MOST_BYTES, MOST_TOKENS = 4 * LONG_BYTES, 512
USER = {"role": "user", "content": "Hi"}
HI = [5] * TOKENS


class Turns:
    """The work of each turn of a server's event loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.bytes: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()
        self.elsewhere: Counter[str] = Counter()

    def count(self, counter: Counter[int], amount: int) -> None:
        if threading.current_thread().name == "live-server":
            counter[self.turn] += amount
        else:
            self.elsewhere[threading.current_thread().name] += amount

    def check(self) -> None:
        assert max(self.bytes.values(), default=0) <= MOST_BYTES
        assert max(self.tokens.values(), default=0) <= MOST_TOKENS


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Counts until the test's end."""
    found = Turns()
    run, encode, dumps = asyncio.events.Handle._run, msgspec.json.encode, orjson.dumps
    named, pushed, builtins = TokenNames.bytes_of, Detokenizer.push, msgspec.to_builtins

    def next_turn(self: asyncio.Handle) -> None:
        if threading.current_thread().name == "live-server":
            found.turn += 1
        run(self)

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def encoded(*arguments: Any, **more: Any) -> Any:
            made = plain(*arguments, **more)
            found.count(found.bytes, len(made) if isinstance(made, bytes) else len(encode(made)))
            return made

        return encoded

    def of_token(plain: Callable[..., Any]) -> Callable[..., Any]:
        def one(self: Any, token: int) -> Any:
            found.count(found.tokens, 1)
            return plain(self, token)

        return one

    monkeypatch.setattr(asyncio.events.Handle, "_run", next_turn)
    monkeypatch.setattr(msgspec.json, "encode", counted(encode))
    monkeypatch.setattr(msgspec, "to_builtins", counted(builtins))
    monkeypatch.setattr(orjson, "dumps", counted(dumps))
    monkeypatch.setattr(TokenNames, "bytes_of", of_token(named))
    monkeypatch.setattr(Detokenizer, "push", of_token(pushed))
    return found


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(max_body_bytes=16 << 20) as server:
        server.engine.burst = 4
        server.engine.answer = lambda request: [5 + n % 300 for n in range(TOKENS)]
        yield server


MANY = {"max_tokens": TOKENS, "ignore_eos": True}
SCORED = {**MANY, "logprobs": True, "top_logprobs": 20}
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER], **SCORED}),
    ("/v1/chat/completions", {"messages": [USER], **SCORED, "n": 2}),
    ("/v1/chat/completions", {"messages": [USER], **SCORED, "stream": True}),
    ("/v1/chat/completions", {"messages": [{**USER, "content": "owl " * TOKENS}], "prompt_logprobs": 20}),
    (
        "/v1/chat/completions",
        {"messages": [{**USER, "content": "owl " * 20_000}], "stream": True, "return_token_ids": True, "max_tokens": 1},
    ),
    ("/v1/completions", {"prompt": "Hi", **MANY, "logprobs": 5}),
    ("/v1/completions", {"prompt": "Hi", **MANY, "best_of": 3}),
    ("/v1/completions", {"prompt": HI, "max_tokens": 1, "prompt_logprobs": 20}),
    ("/v1/completions", {"prompt": HI, "max_tokens": 1, "echo": True, "logprobs": 5}),
    ("/v1/completions", {"prompt": HI, "max_tokens": 1, "echo": True, "logprobs": 5, "stream": True}),
    ("/v1/completions", {"prompt": "owl " * 30_000, "max_tokens": 1, "echo": True, "stream": True}),
    ("/v1/completions", {"prompt": [5] * 60_000, "max_tokens": 1, "return_token_ids": True, "stream": True}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": TOKENS, "top_logprobs": 20}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": TOKENS, "top_logprobs": 20, "stream": True}),
    ("/v1/responses", {"input": "Hi", "instructions": "owl " * 30_000, "max_output_tokens": 1, "stream": True}),
    ("/v1/messages", {"messages": [USER], "max_tokens": TOKENS}),
    ("/tokenize", {"prompt": "owl " * 20_000, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6, 7] * 20_000}),
]


@pytest.mark.parametrize(("path", "fields"), ANSWERS, ids=[f"{n}{path}" for n, (path, _) in enumerate(ANSWERS)])
def test_no_turn_has_much_to_do(live: LiveServer, turns: Turns, path: str, fields: dict[str, Any]) -> None:
    include = {"include": ["message.output_text.logprobs"]} if "top_logprobs" in fields and "input" in fields else {}
    answer = live.http.post(path, json={"model": MODEL, **fields, **include})
    assert answer.status_code == 200, answer.text[:300]
    assert len(answer.content) > LONG_BYTES // 16
    if len(answer.content) > 4 * LONG_BYTES and not fields.get("stream"):
        assert turns.elsewhere["writing-0"], "a long answer is written in the pool"
    turns.check()
    if fields.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert answer.json()


def test_a_long_response_is_kept_and_fetched(live: LiveServer, turns: Turns) -> None:
    fields = {"model": MODEL, "input": "Hi", "max_output_tokens": TOKENS, "top_logprobs": 20}
    made = live.http.post("/v1/responses", json=fields | {"include": ["message.output_text.logprobs"]}).json()
    [item] = made["output"]
    assert len(item["content"][0]["logprobs"]) == TOKENS
    assert live.http.get(f"/v1/responses/{made['id']}").json() == made
    turns.check()


def test_a_long_response_in_the_background(live: LiveServer, turns: Turns) -> None:
    fields = {"model": MODEL, "input": "Hi", "max_output_tokens": TOKENS, "top_logprobs": 20, "background": True}
    fields["include"] = ["message.output_text.logprobs"]
    text = live.http.post("/v1/responses", json={**fields, "stream": True}).text
    whole = orjson.loads(text.rsplit("data: ", 2)[1])["response"]
    assert live.http.get(f"/v1/responses/{whole['id']}").json() == whole
    turns.check()


def test_long_input_is_listed(live: LiveServer, turns: Turns) -> None:
    said = [{"role": "user", "content": f"{number} " + "owl " * 900} for number in range(60)]
    made = live.http.post("/v1/responses", json={"model": MODEL, "input": said, "max_output_tokens": 1}).json()
    listed = live.http.get(f"/v1/responses/{made['id']}/input_items?limit=100&order=asc").json()
    assert [item["content"][0]["text"] for item in listed["data"]] == [one["content"] for one in said]
    turns.check()


def test_a_tokenizer_with_many_settings_is_told(
    live: LiveServer, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tokenizer = live.service.require_ready()
    many = {"added_tokens_decoder": {str(n): {"content": f"<{n}>", "special": True} for n in range(20_000)}}
    monkeypatch.setattr(tokenizer, "config", {**tokenizer.config, **many})
    assert live.http.get("/tokenizer_info").json()["added_tokens_decoder"] == many["added_tokens_decoder"]
    turns.check()


@pytest.mark.parametrize("told", ["echo", "return_token_ids"])
def test_a_prompt_is_not_told_again_without_bound(live: LiveServer, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setattr(plan_answers, "_MAX_TOLD_AGAIN", 20)
    fields = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 1, told: True}
    assert live.http.post("/v1/completions", json={**fields, "n": 2}).status_code == 200
    assert live.http.post("/v1/completions", json={**fields, "n": 3, "stream": True}).status_code == 200
    error = live.http.post("/v1/completions", json={**fields, "n": 3}).json()["error"]
    assert error["param"] == "n"
    assert told in error["message"]


def test_scores_are_those_of_their_tokens(live: LiveServer) -> None:
    """Encoded early, they are still what OpenAI's client reads."""
    fields = {"max_tokens": 3, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    chat = live.http.post("/v1/chat/completions", json={"model": MODEL, "messages": [USER], **fields})
    read = openai.types.chat.ChatCompletion.model_validate_json(chat.text)
    scores = read.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert [one.logprob for one in scores.content] == [-0.05, -0.06, -0.07]
    assert [len(one.top_logprobs) for one in scores.content] == [2, 2, 2]
    assert [one.token.encode() for one in scores.content] == [bytes(one.bytes or []) for one in scores.content]
