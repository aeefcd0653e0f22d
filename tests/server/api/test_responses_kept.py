"""Responses that are kept: `previous_response_id`, GET, DELETE, the items of the input, and whose they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_chat import TEMPLATE, prompt_of, says
from tests.server.api.test_responses import WEATHER

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "cold"}


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as live:
        yield live


def post(server: LiveServer, **fields: Any) -> httpx2.Response:
    return server.http.post("/v1/responses", json={"model": MODEL, "input": "Hello", **fields})


def refusal(server: LiveServer, **fields: Any) -> tuple[str, str, str]:
    """The field, the code and the words of a 400."""
    response = post(server, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["code"], error["message"]


def test_a_conversation_goes_on_from_its_last_response(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "A")
    create = chat.openai.responses.create
    first = create(model=MODEL, input="One", instructions="Be brief")
    second = create(model=MODEL, input="Two", previous_response_id=first.id)
    third = create(model=MODEL, input="Three", previous_response_id=second.id, instructions="Be loud")
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(chat, tokenizer) == "<|im_start|>system\nBe loud<|im_end|>\n" + "A<|im_end|>\n".join(
        turn.format(words) for words in ("One", "Two", "Three")
    )
    assert third.previous_response_id == second.id
    branch = create(model=MODEL, input="Else", previous_response_id=first.id)
    assert "Two" not in prompt_of(chat, tokenizer)
    assert branch.id != second.id


def test_a_stream_and_a_whole_answer_are_kept_alike(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "<think>Hm.</think>Yes.")
    for stream in (False, True):
        response = post(chat, stream=stream, metadata={"a": "b"}, tools=[WEATHER, {"type": "mcp"}])
        data = response.text.split("\n\n")[-3].partition("data: ")[2] if stream else response.text
        told = json.loads(data)["response"] if stream else json.loads(data)
        assert told["store"] is True
        assert chat.http.get(f"/v1/responses/{told['id']}").json() == told
    assert chat.openai.responses.retrieve(told["id"]).output_text == "Yes."


@pytest.mark.parametrize("fields", [{"store": False}, {"max_output_tokens": -1}])
def test_what_is_not_to_be_kept_is_not(chat: LiveServer, fields: dict[str, Any]) -> None:
    response = post(chat, **fields)
    assert response.json().get("store", False) is False
    assert chat.service.kept._kept is not None
    assert chat.service.kept._kept.store.used_bytes == 0


def test_a_response_that_failed_is_not_kept(chat: LiveServer) -> None:
    chat.engine.failure = ValueError("secret")
    assert post(chat).status_code == 500
    assert chat.service.kept._kept is not None
    assert chat.service.kept._kept.store.used_bytes == 0


def test_the_items_of_the_input_come_in_pages(chat: LiveServer) -> None:
    given = [{"role": "user", "content": f"Word {number}"} for number in range(5)]
    kept = chat.openai.responses.create(model=MODEL, input=[*given, CALL, OUTPUT])  # pyright: ignore
    listed = chat.openai.responses.input_items.list
    everything = list(listed(kept.id, limit=2, order="asc"))
    assert [item.type for item in everything] == ["message"] * 5 + ["function_call", "function_call_output"]
    assert list(listed(kept.id, limit=3)) == everything[::-1]
    ids = [item.id for item in everything]
    assert len(set(ids)) == 7
    page = listed(kept.id, limit=2, order="asc", after=ids[4] or "")
    assert ([item.id for item in page.data], page.has_more) == (ids[5:], False)
    path = f"/v1/responses/{kept.id}/input_items"
    assert chat.http.get(path, params={"after": ids[-1], "order": "asc"}).json()["data"] == []
    assert everything[0].model_dump()["content"] == [
        {"type": "input_text", "text": "Word 0", "prompt_cache_breakpoint": None}
    ]
    for wrong in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_none"}):
        assert chat.http.get(path, params=wrong).status_code == 400


def test_a_deleted_response_is_gone(chat: LiveServer) -> None:
    first = post(chat).json()["id"]
    second = post(chat, previous_response_id=first).json()["id"]
    assert chat.http.delete(f"/v1/responses/{first}").json() == {"id": first, "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        gone = chat.http.request(method, f"/v1/responses/{first}{path}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
    assert refusal(chat, previous_response_id=first)[:2] == ("previous_response_id", "previous_response_not_found")
    param, code, message = refusal(chat, previous_response_id=second)
    assert (param, code) == ("previous_response_id", "previous_response_not_found")
    assert first in message
    assert chat.http.get(f"/v1/responses/{second}").status_code == 200


def test_one_of_many_deletes_succeeds(chat: LiveServer) -> None:
    name = post(chat).json()["id"]
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: httpx2.delete(f"{chat.url}/v1/responses/{name}").status_code, range(16))]
    assert sorted(answers) == [200] + [404] * 15


@pytest.mark.parametrize("name", ["resp_1", "x" * 8000, "%00", "a%2Fb", "%C3%A9", "..%2F..", "'; DROP TABLE responses"])
def test_an_id_that_there_is_not(chat: LiveServer, name: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = chat.http.request(method, f"/v1/responses/{name}{path}")
        assert answer.status_code == 404
        assert len(answer.text) < 500
    assert post(chat).status_code == 200


def test_only_a_background_response_can_be_cancelled_or_streamed_again(chat: LiveServer) -> None:
    name = post(chat).json()["id"]
    assert chat.http.post(f"/v1/responses/{name}/cancel").status_code == 400
    streamed = chat.http.get(f"/v1/responses/{name}", params={"stream": True})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    after = chat.http.get(f"/v1/responses/{name}", params={"starting_after": 3})
    assert (after.status_code, after.json()["error"]["param"]) == (400, "starting_after")


def test_a_response_is_its_keys(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE, api_key="ann:secret-of-ann,bob:secret-of-bob") as server:
        ann, bob = ({"Authorization": f"Bearer secret-of-{name}"} for name in ("ann", "bob"))
        body = {"model": MODEL, "input": "Hello"}
        made = server.http.post("/v1/responses", json=body, headers=ann).json()
        name, item = made["id"], made["output"][0]["id"]
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            assert server.http.request(method, f"/v1/responses/{name}{path}", headers=bob).status_code == 404
            assert server.http.request(method, f"/v1/responses/{name}{path}").status_code == 401
        for wrong in ({"previous_response_id": name}, {"input": [{"type": "item_reference", "id": item}]}):
            assert server.http.post("/v1/responses", json=body | wrong, headers=bob).status_code == 400
            assert server.http.post("/v1/responses", json=body | wrong, headers=ann).status_code == 200
        assert server.http.delete(f"/v1/responses/{name}", headers=ann).status_code == 200


@pytest.mark.parametrize(
    ("items", "place", "words"),
    [
        ([OUTPUT], 0, "no function_call 'c1' before"),
        ([OUTPUT, CALL], 0, "no function_call 'c1' before"),
        ([CALL, OUTPUT, OUTPUT], 2, "two outputs"),
        ([CALL, CALL], 1, "another call"),
        ([CALL, OUTPUT, CALL], 2, "another call"),
        ([CALL, {**OUTPUT, "type": "custom_tool_call_output"}], 1, "no custom_tool_call 'c1' before"),
        ([{**CALL, "call_id": ""}], 0, ""),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], 0, "needs `arguments`"),
        ([{**CALL, "output": "x"}], 0, "has no `output`"),
        ([{"role": "user", "content": "x", "call_id": "c"}], 0, "has no `call_id`"),
        ([{"type": "item_reference", "id": "msg_1"}], 0, "no item 'msg_1'"),
        ([{"id": "msg_1"}], 0, "no item 'msg_1'"),
        ([{"role": "user", "content": "x"}, {"type": ["a"]}], 1, ""),
        ([7], 0, ""),
    ],
)
def test_items_that_do_not_fit_together_are_named_by_their_place(
    chat: LiveServer, items: list[Any], place: int, words: str
) -> None:
    param, _, message = refusal(chat, input=items)
    assert param == f"input.{place}" or param.startswith(f"input.{place}.")
    assert words in message
    assert not chat.engine.requests


def test_an_item_is_in_a_conversation_once(chat: LiveServer) -> None:
    made = post(chat).json()
    one = {"type": "item_reference", "id": made["output"][0]["id"]}
    assert refusal(chat, input=[one, one])[0] == "input.1"
    assert refusal(chat, input=[one], previous_response_id=made["id"])[0] == "input.0"
    again = post(chat, input=[one, {"role": "user", "content": "More"}]).json()
    both = post(chat, input="More", previous_response_id=again["id"])
    assert both.status_code == 200
    kept = chat.http.get(f"/v1/responses/{again['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["type"] for item in kept] == ["message", "message"]
    assert kept[0]["content"][0]["text"] == made["output"][0]["content"][0]["text"]


def test_a_server_that_keeps_nothing_names_the_cure(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE, responses_store="none") as server:
        for store in (None, True, False):
            made = post(server, store=store)
            assert (made.status_code, made.json()["store"]) == (200, False)
        name = made.json()["id"]
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            assert server.http.request(method, f"/v1/responses/{name}{path}").status_code == 404
        for wrong, param in (
            ({"previous_response_id": name}, "previous_response_id"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
            ({"background": True}, "background"),
        ):
            told, _, message = refusal(server, **wrong)
            assert told == param
            assert "--responses-store" in message


def test_a_full_store_drops_the_oldest(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE, responses_store_bytes=2**20, max_model_len=2**20) as server:
        server.engine.answer = lambda request: [9]
        text = "word " * 60_000
        first, second, third, fourth = (post(server, input=text).json()["id"] for _ in range(4))
        found = {name: server.http.get(f"/v1/responses/{name}").status_code for name in (first, second, third, fourth)}
        assert found == {first: 404, second: 200, third: 200, fourth: 200}
        assert post(server, input=text, previous_response_id=second).status_code == 200
        assert server.http.get(f"/v1/responses/{second}").status_code == 200
        assert server.http.get(f"/v1/responses/{third}").status_code == 404
        large = post(server, input="word " * 220_000)
        assert (large.status_code, large.json()["store"]) == (200, False)


def test_a_store_that_fails_does_not_cost_an_answer(chat: LiveServer, tmp_path: Path) -> None:
    name = post(chat).json()["id"]
    assert chat.service.kept._kept is not None
    chat.service.kept._kept.store.close()
    answer = post(chat)
    assert (answer.status_code, answer.json()["store"]) == (200, False)
    assert chat.http.get(f"/v1/responses/{name}").json()["error"]["code"] == "store_failed"
    assert post(chat, previous_response_id=name).status_code == 503


def test_long_items_are_read_as_short_ones_are(chat: LiveServer, tokenizer: Tokenizer) -> None:
    chat.engine.answer = lambda request: [9]
    text = "word " * 4000
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": text}], "status": None},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]},
        {
            "type": "message",
            "role": "assistant",
            "phase": None,
            "content": [{"type": "output_text", "text": "Yes", "annotations": []}],
        },
        {**CALL, "id": "fc_1", "status": "completed", "async_": None, "parsed_arguments": {"city": "Oslo"}},
        {**OUTPUT, "output": [{"type": "input_text", "text": text}]},
    ]
    tools = [{**WEATHER, "description": "word " * 3000}, {"type": "web_search"}]
    response = post(chat, input=items, tools=tools)
    assert response.status_code == 200, response.text
    assert prompt_of(chat, tokenizer).count(text) == 2
    wrong = post(chat, input=[*items, {"role": "user", "content": "x", "shape": 1}])
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unknown_parameter")


def test_many_items_do_not_stall_others(chat: LiveServer) -> None:
    chat.engine.answer = lambda request: [9]
    items = [{"role": "user", "content": "a"}] * 5_000
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(post, chat, input=items)
        while not long.done():
            assert httpx2.get(f"{chat.url}/health", timeout=5).status_code == 200
        assert long.result().status_code in (200, 400)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_waited_for_is_not_kept(chat: LiveServer, stream: bool) -> None:
    chat.engine.hold_decode_after = 1
    body = json.dumps({"model": MODEL, "input": "Hello", "stream": stream}).encode()
    with chat.connect(body, "/v1/responses"):
        eventually(lambda: bool(chat.engine.running))
    eventually(lambda: chat.idle)
    assert chat.engine.cancelled
    assert chat.service.kept._kept is not None
    assert chat.service.kept._kept.store.used_bytes == 0
