"""Prompts that begin with a kept document, on each endpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import TEMPLATE, prompt_of
from tests.server.api.test_documents import PAGE, TEXT, reads, refusal, upload

WRAPPED = f'<document name="owl">\n{TEXT}\n</document>'
USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
PLAIN = "{%- for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as live:
        yield live


def post(server: LiveServer, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = server.http.post(path, json={"model": MODEL, **fields})
    assert response.status_code == status, response.text
    return response.json()


ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1},
    "/v1/responses": {"input": "Why?", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_text_is_the_first_of_the_users_first_message(chat: LiveServer, tokenizer: Tokenizer, path: str) -> None:
    told = upload(chat, name="owl")
    [prefix] = reads(chat)
    for reference in (told["id"], "owl"):
        post(chat, path, document=reference, **ENDPOINTS[path])
        assert prompt_of(chat, tokenizer) == USER.format(f"{WRAPPED}\nWhy?")
        asked = chat.engine.requests[-1]
        assert asked.prompt[: len(prefix)] == prefix
        assert len(prefix) == told["tokens"] // PAGE * PAGE
    # All but the document's end is common to all questions about it.
    assert len(asked.prompt) - told["tokens"] < 40


def test_what_comes_before_it_is_the_callers(chat: LiveServer, tokenizer: Tokenizer) -> None:
    upload(chat, name="owl")
    ask = {"document": "owl", "max_tokens": 1}
    system = {"role": "system", "content": "Be brief."}
    later = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    first = {"role": "user", "content": "Does it sleep?"}
    post(chat, "/v1/chat/completions", messages=[system, first, *later], **ask)
    wrapped = f"{WRAPPED}\nDoes it sleep?"
    said = f"<|im_start|>user\n{wrapped}<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    assert prompt_of(chat, tokenizer) == SYSTEM + said + USER.format("Why?")
    post(chat, "/v1/chat/completions", messages=[system], **ask)
    assert prompt_of(chat, tokenizer) == SYSTEM + USER.format(WRAPPED)


def test_messages_precede_the_requests(chat: LiveServer, tokenizer: Tokenizer) -> None:
    kept = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    told = upload(chat, messages=[*kept, {"role": "assistant", "content": "Ask."}], name="owl")
    assert told["kind"] == "messages"
    post(chat, "/v1/chat/completions", document="owl", **ENDPOINTS["/v1/chat/completions"])
    before = f"{SYSTEM}<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\nAsk.<|im_end|>\n"
    assert prompt_of(chat, tokenizer) == before + USER.format("Why?")
    [prefix, asked] = [request.prompt for request in chat.engine.requests]
    assert asked[: len(prefix)] == prefix
    assert len(asked) - told["tokens"] < 40
    completion = chat.complete(document="owl")
    assert refusal(completion, 400)[:2] == ("document", "invalid_value")


def test_a_document_precedes_the_prompt_of_a_completion(chat: LiveServer, tokenizer: Tokenizer) -> None:
    upload(chat, name="owl", use="completion")
    ids = tokenizer.encode_here(TEXT)
    assert reads(chat) == [ids[: len(ids) // PAGE * PAGE]]
    own = tokenizer.encode_here("Why?", special=False)
    for prompt in ("Why?", own, ["Why?", "Who?"], [own, own]):
        assert chat.complete(document="owl", prompt=prompt, max_tokens=1).status_code == 200
        assert chat.engine.requests[-1].prompt[: len(ids)] == ids
    assert chat.engine.requests[-1].prompt == [*ids, *own]
    upload(chat, token_ids=own * 40, name="ids")
    assert chat.complete(document="ids", prompt="Who?", max_tokens=1).status_code == 200
    assert chat.engine.requests[-1].prompt == [*own * 40, *tokenizer.encode_here("Who?", special=False)]
    chats = chat.http.post(
        "/v1/chat/completions", json={"model": MODEL, "document": "ids", "messages": [{"role": "user", "content": "a"}]}
    )
    assert refusal(chats, 400)[:2] == ("document", "invalid_value")


@pytest.mark.parametrize("template", [PLAIN, None], ids=["a plain template", "no template"])
def test_what_is_read_ahead_is_what_questions_begin_with(
    make_server: Callable[..., LiveServer], template: str | None
) -> None:
    with make_server(template=template) as server:
        told = upload(server, use="chat", text=TEXT * 3)
        [prefix] = reads(server)
        for question in ("Why?", "\n\nWhy?", "</document>", "0", " ", "\u3042"):
            post(
                server,
                "/v1/chat/completions",
                document=told["id"],
                messages=[{"role": "user", "content": question}],
                max_tokens=1,
            )
            assert server.engine.requests[-1].prompt[: len(prefix)] == prefix
        default = upload(server)["use"]
        assert default == ("completion" if server.service.chat.template.is_default else "chat")


def test_the_salt_and_the_policy_are_the_documents_unless_a_request_has_its_own(chat: LiveServer) -> None:
    upload(chat, name="owl", cache_salt="s", attention="window:512:4")
    for fields, salt, policy in (
        ({}, "s", "window"),
        ({"cache_salt": "t"}, "t", "window"),
        ({"attention": "dense"}, "s", "dense"),
    ):
        for path, body in (*ENDPOINTS.items(), ("/v1/completions", {"prompt": "Why?", "max_tokens": 1})):
            post(chat, path, document="owl", **body, **fields)
            asked = chat.engine.requests[-1]
            assert (asked.cache_salt, asked.attention.name) == (salt, policy)


def test_special_tokens_in_a_document_are_read_as_in_prompts(chat: LiveServer, tokenizer: Tokenizer) -> None:
    marked = "The <|im_end|> owl </s>"
    for use in ("chat", "completion"):
        upload(chat, text=marked, name=use, use=use)
    post(chat, "/v1/chat/completions", document="chat", messages=[{"role": "user", "content": "Why?"}], max_tokens=1)
    kept = chat.engine.requests[-1].prompt
    said = f'<document name="chat">\n{marked}\n</document>\nWhy?'
    post(chat, "/v1/chat/completions", messages=[{"role": "user", "content": said}], max_tokens=1)
    assert chat.engine.requests[-1].prompt == kept
    chat.complete(document="completion", prompt="Why?", max_tokens=1)
    assert chat.engine.requests[-1].prompt[: len(tokenizer.encode_here(marked))] == tokenizer.encode_here(marked)


def test_counts_include_the_document(chat: LiveServer) -> None:
    upload(chat, name="owl")
    body = ENDPOINTS["/v1/messages"]
    counted = post(chat, "/v1/messages/count_tokens", document="owl", messages=body["messages"])["input_tokens"]
    assert post(chat, "/v1/messages", document="owl", **body)["usage"]["input_tokens"] == counted
    assert post(chat, "/v1/responses/input_tokens", document="owl", input="Why?")["input_tokens"] == counted
    assert (
        post(chat, "/v1/chat/completions", document="owl", **ENDPOINTS["/v1/chat/completions"])["usage"][
            "prompt_tokens"
        ]
        == counted
    )


def test_references_that_mean_nothing_or_too_much_are_refused(chat: LiveServer) -> None:
    ids = [upload(chat, text=f"{number} {TEXT}", name="owl")["id"] for number in range(2)]
    _, code, message = refusal(chat.complete(document="owl"), 400)
    assert code == "ambiguous_document"
    assert all(document in message for document in ids)
    assert chat.complete(document=ids[0].replace("doc-", "file-"), max_tokens=1).status_code == 200
    for reference in ("doc-no", "no", ids[0][:-1]):
        assert refusal(chat.complete(document=reference), 404)[:2] == ("document", "document_not_found")
    assert refusal(chat.complete(document=""), 400)[0] == "document"
    for field, value in (("echo", True), ("truncate_prompt_tokens", 5)):
        assert refusal(chat.complete(document=ids[0], **{field: value}), 400)[0] == field
    messages = [{"role": "user", "content": "Why?"}]
    cut = chat.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": messages, "document": ids[0], "truncate_prompt_tokens": 5},
    )
    assert refusal(cut, 400)[0] == "truncate_prompt_tokens"


def test_a_prompt_that_does_not_fit_behind_its_document_says_how_long_both_are(
    make_server: Callable[..., LiveServer],
) -> None:
    with make_server(template=TEMPLATE, max_model_len=1024) as server:
        told = upload(server, name="owl", use="completion")
        response = server.complete(document="owl", prompt="Why " * 400, max_tokens=1)
        assert refusal(response, 400)[:2] == ("prompt", "context_length_exceeded")
        error = response.json()["error"]
        assert error.get("n_prompt_tokens", error.get("n_prompt_tokens_at_least")) > max(1024, told["tokens"])


def test_a_request_goes_on_with_a_document_that_is_deleted(chat: LiveServer) -> None:
    told = upload(chat, name="owl")
    chat.engine.hold_decode_after = 1
    with chat.http.stream(
        "POST",
        "/v1/completions",
        json={"model": MODEL, "prompt": "Why?", "document": "owl", "stream": True, "max_tokens": 3},
    ) as stream:
        lines = stream.iter_lines()
        assert "data: " in next(lines)
        assert chat.http.delete(f"/v1/documents/{told['id']}").status_code == 200
        chat.engine.hold_decode_after = None
        assert "data: [DONE]" in [*lines]


def test_the_log_and_the_cache_name_the_document(chat: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    told = upload(chat, name="owl")
    with caplog.at_level(logging.INFO, "longreach.requests"):
        post(chat, "/v1/chat/completions", document="owl", **ENDPOINTS["/v1/chat/completions"])
    assert f" document={told['id']} completion=" in caplog.text
    assert "The owl" not in caplog.text
    ask = {"max_tokens": 1, "document": "owl", "return_cache_usage": True}
    kept = post(chat, "/v1/completions", prompt="Why?", **ask)["usage"]["cache"]
    again = post(chat, "/v1/completions", prompt="Why not?", **ask)["usage"]["cache"]
    assert again["parted"]["field"] == "prompt"
    assert kept["parted"] is None or kept["parted"]["field"] == "document"


def test_a_turn_of_responses_names_the_document_again(chat: LiveServer, tokenizer: Tokenizer) -> None:
    upload(chat, name="owl")
    chat.engine.answer = lambda request: tokenizer.encode_here("Yes.")[1:]
    first = post(chat, "/v1/responses", input="Does it?", document="owl")
    ask = {"input": "Why?", "previous_response_id": first["id"], "max_output_tokens": 1}
    post(chat, "/v1/responses", document="owl", **ask)
    assert WRAPPED + "\nDoes it?<|im_end|>" in prompt_of(chat, tokenizer)
    post(chat, "/v1/responses", **ask)
    assert "<document" not in prompt_of(chat, tokenizer)
