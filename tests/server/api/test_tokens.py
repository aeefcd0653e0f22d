"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_chat import HELLO, TEMPLATE, prompt_of
from tests.server.api.told import error_of
from tests.server.conftest import BOS, EOS


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
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(server: LiveServer, path: str, body: dict[str, Any], param: str | None) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert server.http.post(path, json=body | {"model": "other"}).status_code in (400, 404)


def test_what_the_tokenizers_files_say(make_server: Callable[..., LiveServer], model_dir: Path) -> None:
    with make_server(template=TEMPLATE) as server:
        info = server.http.get("/tokenizer_info").json()
        assert {name: info[name] for name in ("bos_token", "eos_token", "pad_token", "chat_template")} == {
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": None,
            "chat_template": TEMPLATE,
        }
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    config = {"eos_token": {"content": EOS}, "tokenizer_class": "Owl", "model_max_length": 7, "clean_up": None}
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json")), config)
    with make_server(template=TEMPLATE) as server:
        server.call(lambda: server.service.attach(server.engine, tokenizer, server.service.chat))
        eventually(lambda: server.http.get("/tokenizer_info").json().get("model_max_length") == 7)
        info = server.http.get("/tokenizer_info").json()
        assert (info["tokenizer_class"], info["eos_token"], info["clean_up"]) == ("Owl", EOS, None)
    with make_server(ready=False) as server:
        error_of(server.http.get("/tokenizer_info"), 503, "loading")
    with make_server(api_key="long-enough") as server:
        error_of(server.http.get("/tokenizer_info"), 401, "invalid_api_key")
