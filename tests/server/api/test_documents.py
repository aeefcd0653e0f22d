"""`/v1/documents`: what is kept for whom, how it is read ahead, and what outlives an engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from longreach.api.service.service import Service
from longreach.config import load_settings
from longreach.engine.errors import RequestFailedError
from longreach.engine.looks import Looked
from longreach.errors import ConfigError
from longreach.text.tokenizer import Tokenizer
from longreach.util import handover

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.fake_engine import EchoEngine, started
from tests.server.api.test_chat import TEMPLATE

TEXT = "The owl sleeps in the day. " * 30
PAGE = 64  # tokens of the engine's pages: a part of one is not read ahead
KEYS = "ann:secret-of-ann,bob:secret-of-bob"


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as live:
        yield live


def upload(server: LiveServer, status: int = 201, key: str = "none", **fields: Any) -> dict[str, Any]:
    given = {"text": TEXT} if not {"text", "messages", "token_ids"} & fields.keys() else {}
    response = server.http.post("/v1/documents", json={"wait": True, **given, **fields}, headers=bearer(key))
    assert response.status_code == status, response.text
    return response.json()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def get(server: LiveServer, document: dict[str, Any]) -> dict[str, Any]:
    return server.http.get(f"/v1/documents/{document['id']}").json()


def refusal(response: httpx2.Response, status: int) -> tuple[str | None, str, str]:
    """The field, the code and the words of an error."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["code"], error["message"]


def reads(server: LiveServer) -> list[list[int]]:
    """The prompts that were read ahead."""
    return [request.prompt for request in server.engine.requests if request.flexible]


def test_a_document_is_kept_read_and_told(chat: LiveServer) -> None:
    chat.engine.looked = Looked(look_id=0, total=0, gpu=128, disk=64, gpu_bytes=9, disk_bytes=5, seconds_whole=3.0)
    told = upload(chat, name="owl", ttl_seconds=3600, attention="window:512:4", cache_salt="s")
    assert (told["object"], told["name"], told["kind"], told["use"]) == ("document", "owl", "text", "chat")
    assert (told["state"], told["bytes"], told["uses"], told["error"]) == ("ready", len(TEXT), 0, None)
    assert told["expires_at"] == told["created_at"] + told["ttl_seconds"] == told["created_at"] + 3600
    assert told["attention"]["policy"] == "window"
    [request] = chat.engine.requests
    assert (request.flexible, request.max_tokens, request.cache_salt, request.attention.name) == (
        True,
        1,
        "s",
        "window",
    )
    assert len(request.prompt) == told["tokens"] // PAGE * PAGE
    cache = get(chat, told)["cache"]
    assert (cache["gpu"], cache["disk"]) == ({"tokens": 128, "bytes": 9}, {"tokens": 64, "bytes": 5})
    assert (cache["seconds_to_read"], cache["seconds_to_first_token"]) == (3.0, None)
    [(looked, salt, policy)] = chat.engine.looks
    assert (len(looked), salt, policy.name) == (told["tokens"], "s", "window")
    assert chat.http.delete(f"/v1/documents/{told['id']}").json() == {
        "id": told["id"],
        "object": "document",
        "deleted": True,
    }
    for path in (f"/v1/documents/{told['id']}", "/v1/documents/owl"):
        assert refusal(chat.http.get(path), 404)[1] == "document_not_found"
        assert refusal(chat.http.delete(path), 404)[1] == "document_not_found"


def test_the_answer_comes_before_the_document_is_read(chat: LiveServer) -> None:
    chat.engine.hold_prefill = True
    first, second = upload(chat, name="a", wait=False), upload(chat, name="b", wait=False)
    assert (first["state"], second["state"]) == ("reading", "reading")
    eventually(lambda: len(chat.engine.running) == 1)  # one at a time
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(upload, chat, 200, name="b")
        chat.engine.hold_prefill = False
        assert waits.result()["state"] == "ready"
    assert get(chat, first)["state"] == "ready"
    assert len(chat.engine.requests) >= 2


def test_documents_are_listed_in_pages(chat: LiveServer) -> None:
    ids = [upload(chat, text=f"{number} {TEXT}", name=f"n{number % 2}")["id"] for number in range(3)]
    whole = chat.http.get("/v1/documents").json()
    assert [one["id"] for one in whole["data"]] == ids[::-1]
    assert (whole["object"], whole["first_id"], whole["last_id"], whole["has_more"]) == ("list", ids[2], ids[0], False)
    page = chat.http.get("/v1/documents", params={"limit": 1, "order": "asc", "after": ids[0]}).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([ids[1]], True)
    named = chat.http.get("/v1/documents", params={"name": "n0"}).json()
    assert [one["id"] for one in named["data"]] == [ids[2], ids[0]]
    assert "cache" not in named["data"][0]
    assert refusal(chat.http.get("/v1/documents", params={"after": "doc-no"}), 404)[0] == "after"
    assert refusal(chat.http.get("/v1/documents", params={"limit": "101"}), 400)[0] == "limit"


def test_the_same_document_is_kept_once(chat: LiveServer) -> None:
    first = upload(chat, name="owl")
    again = upload(chat, 200, name="owl", pin=True)
    assert (again["id"], again["pinned"], again["expires_at"]) == (first["id"], True, None)
    assert upload(chat, name="other")["id"] != first["id"]


def test_nothing_of_one_key_is_found_under_another(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE, api_key=KEYS) as server:
        ann, bob = bearer("secret-of-ann"), bearer("secret-of-bob")
        own = upload(server, key="secret-of-ann", name="owl")
        path = f"/v1/documents/{own['id']}"
        question = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Why?"}]}
        for reference in (own["id"], "owl"):
            asked = server.http.post("/v1/chat/completions", json={**question, "document": reference}, headers=bob)
            assert refusal(asked, 404)[:2] == ("document", "document_not_found")
        for method, body in (("GET", None), ("DELETE", None), ("POST", {"pin": True})):
            assert refusal(server.http.request(method, path, json=body, headers=bob), 404)[1] == "document_not_found"
        assert server.http.get("/v1/documents", headers=bob).json()["data"] == []
        assert len(server.http.get("/v1/documents", headers=ann).json()["data"]) == 1
        asked = server.http.post("/v1/chat/completions", json={**question, "document": "owl"}, headers=ann)
        assert asked.status_code == 200
        salts = {request.cache_salt for request in server.engine.requests}
        assert len(salts) == 1  # the salt of what was read ahead is that of the key's requests
        assert upload(server, key="secret-of-bob", name="owl")["id"] != own["id"]
        assert len({request.cache_salt for request in server.engine.requests}) == 2


def test_a_pin_is_sent_to_the_engine_and_to_each_that_follows(chat: LiveServer) -> None:
    pinned, other = upload(chat, name="pinned", pin=True, cache_salt="s"), upload(chat, name="other")
    assert {name: salt for name, (_, salt, _) in chat.engine.pins.items()} == {pinned["id"]: "s"}
    assert len(chat.engine.pins[pinned["id"]][0]) == pinned["tokens"]
    changed = chat.http.post(f"/v1/documents/{other['id']}", json={"pin": True, "name": "new", "ttl_seconds": 60})
    assert (changed.json()["name"], changed.json()["pinned"], changed.json()["ttl_seconds"]) == ("new", True, 60)
    eventually(lambda: other["id"] in chat.engine.pins)
    chat.http.post(f"/v1/documents/{pinned['id']}", json={"pin": False})
    eventually(lambda: pinned["id"] not in chat.engine.pins)
    following = EchoEngine(started())

    async def start(_: object) -> EchoEngine:
        return following

    asyncio.run_coroutine_threadsafe(chat.service.restart(start), chat.loop).result(10)
    metrics = chat.http.get("/metrics").text
    assert re.search(r"^longreach:engine_restarts_total\{.*\} 1\.0$", metrics, re.MULTILINE)
    eventually(lambda: set(following.pins) == {other["id"]})
    eventually(lambda: len(following.requests) == 1 and not following.running)  # and is read there
    chat.http.delete(f"/v1/documents/{other['id']}")
    eventually(lambda: not following.pins)


def test_a_document_is_read_by_the_next_engine_where_one_dies(chat: LiveServer) -> None:
    chat.engine.hold_prefill = True
    told = upload(chat, wait=False)
    eventually(lambda: bool(chat.engine.running))
    chat.call(chat.engine.die)
    eventually(lambda: not chat.engine.running)
    following = EchoEngine(started())

    async def start(_: object) -> EchoEngine:
        return following

    asyncio.run_coroutine_threadsafe(chat.service.restart(start), chat.loop).result(10)
    eventually(lambda: get(chat, told)["state"] == "ready")
    assert len(following.requests) == 1


def test_a_document_that_is_deleted_is_not_read(chat: LiveServer) -> None:
    chat.engine.hold_prefill = True
    first, second = upload(chat, name="a", wait=False), upload(chat, name="b", wait=False)
    eventually(lambda: bool(chat.engine.running))
    for document in (second, first):
        assert chat.http.delete(f"/v1/documents/{document['id']}").status_code == 200
    eventually(lambda: not chat.engine.running)
    chat.engine.hold_prefill = False
    upload(chat, name="c")
    assert len(chat.engine.requests) == 2  # that of `a`, which was cancelled, and that of `c`
    assert len(chat.engine.cancelled) == 1


def test_a_document_that_the_engine_cannot_read_says_so(chat: LiveServer) -> None:
    chat.engine.failure = ValueError("secret")
    told = upload(chat)
    assert told["state"] == "reading"  # what nobody expected is in the log, and it is read at the next start

    chat.engine.failure = RequestFailedError("a step failed", "internal")
    told = upload(chat, name="other")
    assert (told["state"], told["error"]["message"]) == ("failed", "The engine failed to read the document.")
    chat.engine.failure = None
    assert upload(chat, 200, name="other")["state"] == "ready"


def test_documents_outlive_the_server(make_server: Callable[..., LiveServer], model_dir: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "documents.db")
    with make_server(template=TEMPLATE, documents=path) as server:
        pinned, plain = upload(server, name="pinned", pin=True), upload(server, name="plain")
        server.engine.hold_prefill = True
        unread = upload(server, name="unread", wait=False)
        with pytest.raises(ConfigError, match=r"--documents: .* another server has it open"):
            Service(load_settings(model=str(model_dir), documents=path))
        asyncio.run_coroutine_threadsafe(server.service.document_reader.stop(), server.loop).result(10)
        asyncio.run_coroutine_threadsafe(server.service.documents.stop(), server.loop).result(10)
    with make_server(template=TEMPLATE, documents=path) as server:
        server.call(server.service.document_reader.start)
        eventually(lambda: get(server, unread)["state"] == "ready")
        assert get(server, plain)["state"] == "ready"
        eventually(lambda: set(server.engine.pins) == {pinned["id"]})
        assert len(server.engine.requests) == 2  # the pinned one and the unread one
        asyncio.run_coroutine_threadsafe(server.service.documents.stop(), server.loop).result(10)


def test_a_server_waits_for_the_documents_of_one_that_ends(
    make_server: Callable[..., LiveServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling update: the new one answers before the old one has ended, which still answers from its file."""
    path = str(tmp_path / "documents.db")
    with make_server(template=TEMPLATE, documents=path) as old:
        kept = upload(old, name="contract", pin=True)
        with make_server(template=TEMPLATE, documents=path, handover=True) as new:
            new.call(new.service.document_reader.start)
            assert new.complete(max_tokens=1).status_code == 200
            with monkeypatch.context() as patched:
                patched.setattr(handover, "_WAIT_SECONDS", 0.05)
                refused = new.complete(document="contract", max_tokens=1)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_in_use")
                assert refused.headers["Retry-After"] == "5"
            assert get(old, kept)["state"] == "ready"
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(new.complete, document="contract", max_tokens=1)
                asyncio.run_coroutine_threadsafe(old.service.document_reader.stop(), old.loop).result(10)
                asyncio.run_coroutine_threadsafe(old.service.documents.stop(), old.loop).result(10)
                assert waiting.result(30).status_code == 200
            eventually(lambda: set(new.engine.pins) == {kept["id"]})
            asyncio.run_coroutine_threadsafe(new.service.documents.stop(), new.loop).result(10)


def test_token_ids_of_another_tokenizer_are_refused(chat: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    told = upload(chat, token_ids=[5, 6, 7] * 100)
    assert (told["kind"], told["use"], told["tokens"]) == ("tokens", "completion", 300)
    assert chat.complete(document=told["id"], max_tokens=1).status_code == 200
    _, tokenizer = chat.service.require_ready()
    monkeypatch.setattr(tokenizer, "digest", "another")
    response = chat.complete(document=told["id"], max_tokens=1)
    assert refusal(response, 400)[:2] == ("document", "document_of_another_tokenizer")


A_FILE = {"type": "file", "file": {"file_id": "file-1"}}
HELLO = {"role": "user", "content": "Hello"}
BAD: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "nothing": ({}, None, "missing_required_parameter"),
    "two": ({"text": "a", "token_ids": [1]}, None, "missing_required_parameter"),
    "empty": ({"text": ""}, "text", "invalid_value"),
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "no tokens": ({"token_ids": []}, "token_ids", "invalid_value"),
    "strange token": ({"token_ids": [400]}, "token_ids", "invalid_value"),
    "an id for a name": ({"text": "a", "name": "doc-1"}, "name", "invalid_value"),
    "a line in a name": ({"text": "a", "name": "a\nb"}, "name", "invalid_value"),
    "no time": ({"text": "a", "ttl_seconds": 0}, "ttl_seconds", "invalid_value"),
    "tokens in a chat": ({"token_ids": [5], "use": "chat"}, None, "invalid_value"),
    "a chat in a completion": ({"messages": [HELLO], "use": "completion"}, None, "invalid_value"),
    "a file": ({"messages": [{"role": "user", "content": [A_FILE]}]}, "messages", "unsupported_value"),
    "no words": ({"messages": [HELLO, {"role": "user"}]}, "messages.1", "invalid_value"),
    "a stranger": ({"text": "a", "pinned": True}, "pinned", "unknown_parameter"),
    "a budget": (
        {"text": "a", "attention": {"policy": "dynamic", "decode_budget": 4096}},
        "attention.decode_budget",
        "invalid_value",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_documents_are_refused(chat: LiveServer, name: str) -> None:
    body, param, code = BAD[name]
    assert refusal(chat.http.post("/v1/documents", json=body), 400)[:2] == (param, code)
    assert chat.service.documents.totals.documents == 0


def test_a_document_longer_than_the_context_is_refused_with_the_numbers(
    make_server: Callable[..., LiveServer],
) -> None:
    with make_server(template=TEMPLATE, max_model_len=256) as server:
        for body in ({"text": TEXT * 3}, {"token_ids": [5] * 300}, {"text": TEXT, "use": "completion"}):
            response = server.http.post("/v1/documents", json=body)
            assert refusal(response, 400)[1] == "context_length_exceeded"
            error = response.json()["error"]
            assert error["n_ctx"] == 256
            assert error.get("n_prompt_tokens", error.get("n_prompt_tokens_at_least", 0)) >= 256


def test_quotas_name_the_cure(make_server: Callable[..., LiveServer]) -> None:
    with make_server(
        template=TEMPLATE, documents_bytes="1MiB", documents_bytes_per_key="64KiB", documents_per_key=2
    ) as server:
        response = server.http.post("/v1/documents", json={"text": "a b " * 17_000})
        assert refusal(response, 413)[1] == "document_too_large"
        for number in range(2):
            upload(server, text=f"{number} {TEXT}")
        response = server.http.post("/v1/documents", json={"text": "more"})
        _, code, message = refusal(response, 429)
        assert (code, response.headers["x-should-retry"]) == ("document_quota_reached", "false")
        assert "DELETE" in message


def test_a_server_may_keep_none(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE, documents="none") as server:
        for response in (
            server.http.post("/v1/documents", json={"text": "a"}),
            server.complete(document="doc-1"),
        ):
            param, code, message = refusal(response, 400)
            assert (param, code) == ("document", "unsupported_value")
            assert "--documents" in message
        assert server.http.get("/v1/documents").json()["data"] == []
        assert refusal(server.http.get("/v1/documents/doc-1"), 404)[1] == "document_not_found"
        assert refusal(server.http.delete("/v1/documents/doc-1"), 404)[1] == "document_not_found"
        assert "longreach:document" not in server.http.get("/metrics").text


def test_metrics_count_documents(chat: LiveServer) -> None:
    told = upload(chat, pin=True)
    chat.complete(document=told["id"], max_tokens=1)
    chat.complete(document=told["id"], max_tokens=1)
    text = chat.http.get("/metrics").text
    found = {}
    for line in text.splitlines():
        if line.startswith("longreach:document"):
            name, _, value = line.rpartition(" ")
            found[name.replace('engine="0",model_name="tiny-owl"', "").replace("{}", "")] = float(value)
    assert found == {
        'longreach:documents{,pinned="true"}': 1,
        'longreach:documents{,pinned="false"}': 0,
        "longreach:document_bytes": len(TEXT),
        "longreach:document_most_bytes": 2**30,
        "longreach:document_tokens": told["tokens"],
        "longreach:document_waiting": 0,
        "longreach:document_reads_total": 1,
        "longreach:document_uses_total": 2,
        "longreach:document_evictions_total": 0,
        "longreach:document_expirations_total": 0,
    }


def test_uses_and_deletions_at_once_end_one_way_or_the_other(chat: LiveServer) -> None:
    ids = [upload(chat, text=f"Number {number}. {TEXT}", wait=False)["id"] for number in range(12)]

    def use(document: str) -> int:
        return chat.complete(document=document, prompt="Why?", max_tokens=1).status_code

    def delete(document: str) -> int:
        return chat.http.delete(f"/v1/documents/{document}").status_code

    with ThreadPoolExecutor(8) as pool:
        used = [pool.submit(use, document) for document in ids for _ in range(2)]
        deleted = [pool.submit(delete, document) for document in ids for _ in range(2)]
        assert {future.result() for future in used} <= {200, 404}
        assert sorted(future.result() for future in deleted) == [200] * 12 + [404] * 12
    eventually(lambda: chat.idle and not chat.service.document_reader.waiting)
    assert chat.service.documents.totals.documents == 0
    eventually(lambda: not chat.service.bodies.total)


def test_a_policy_goes_to_the_engine_as_it_was_given(chat: LiveServer) -> None:
    policy = {"policy": "window", "size": 512, "sinks": 4}
    told = upload(chat, attention=policy)
    assert told["attention"] == policy
    assert msgspec.to_builtins(chat.engine.requests[0].attention) == policy


def test_the_tokenizer_says_which_one_it_is(tokenizer: Tokenizer, model_dir: Path) -> None:
    assert tokenizer.digest == Tokenizer.load(str(model_dir)).digest


def test_long_bodies_are_taken_as_short_ones_are(chat: LiveServer) -> None:
    policy = {"policy": "window", "size": 512, "sinks": 4}
    long = TEXT * 82  # over 64 KiB, from where on bodies are decoded by the types of their fields
    for number, body in enumerate(
        ({"text": long}, {"messages": [{**HELLO, "content": long}]}, {"token_ids": [5] * 40_000})
    ):
        told = upload(chat, name=f"n{number}", attention=policy, ttl_seconds=60, **body)
        assert (told["state"], told["attention"], told["ttl_seconds"]) == ("ready", policy, 60)
        assert told["bytes"] > 2**16
    response = chat.http.post("/v1/documents", json={"text": long, "pinned": True})
    assert refusal(response, 400)[:2] == ("pinned", "unknown_parameter")
