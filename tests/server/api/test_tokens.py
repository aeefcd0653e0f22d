"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import HELLO, TEMPLATE, prompt_of


def test_a_text_and_back(server: LiveServer, tokenizer: Tokenizer) -> None:
    text = "The owl € 🦉"
    answer = server.http.post("/tokenize", json={"model": MODEL, "prompt": text}).json()
    ids = tokenizer.encode_here(text)
    assert answer == {"count": len(ids), "max_model_len": 65536, "tokens": ids, "token_strs": None}
    bare = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert bare == ids[1:]
    named = server.http.post("/tokenize", json={"prompt": "owl€", "return_token_strs": True}).json()["token_strs"]
    assert named[0] == "<|begin|>"
    assert any(name.startswith("bytes:\\x") for name in named)
    back = server.http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": text}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert not server.engine.requests


def test_a_chat_has_the_tokens_of_its_prompt(make_server: Callable[..., LiveServer], tokenizer: Tokenizer) -> None:
    with make_server(template=TEMPLATE) as server:
        told = server.http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
        server.openai.chat.completions.create(model=MODEL, messages=HELLO)
        assert told == server.engine.requests[0].prompt
        body = {"messages": HELLO, "add_generation_prompt": False}
        shorter = server.http.post("/tokenize", json=body).json()["count"]
        assert shorter < len(told)
        assert prompt_of(server, tokenizer).endswith("assistant\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, None),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(server: LiveServer, path: str, body: dict[str, Any], param: str | None) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert server.http.post(path, json=body | {"model": "other"}).status_code in (400, 404)
