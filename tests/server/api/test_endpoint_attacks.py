"""Every attack of `tests.server.attacks.endpoints` on every endpoint that it is for, while somebody else is served."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.loop_watch import LoopWatch
from tests.server.api.test_long_conversations import CALLS, LONGEST
from tests.server.attacks.endpoints import OPERATIONS, TABLE, USER, Operation

ANN, BOB = ({"Authorization": f"Bearer secret-of-{name}"} for name in ("ann", "bob"))
JSON = {"Content-Type": "application/json"}
LIMIT = 300_000
ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large"}
THOUGHTS = CALLS.replace("{{ message.content }}", "{{ message.reasoning_content }}{{ message.content }}")


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    keys = "ann:secret-of-ann,bob:secret-of-bob"
    with make_server(template=THOUGHTS, api_key=keys, max_body_bytes=LIMIT, write_timeout=0.3) as server:
        yield server


def send(server: LiveServer, operation: Operation, raw: bytes, **headers: str) -> httpx2.Response:
    return server.http.request(operation.method, operation.path, content=raw, headers=JSON | ANN | headers)


def refused(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer, in the form of either protocol."""
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert 0 < len(error["message"]) < 600
    return error


def connect(server: LiveServer, operation: Operation, raw: bytes, sent: int | None = None) -> socket.socket:
    """A socket on which so many bytes of a body have been sent."""
    head = "".join(f"{name}: {value}\r\n" for name, value in (JSON | ANN).items())
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    line = (
        f"{operation.method} {operation.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n{head}\r\n"
    )
    sock.sendall(line.encode() + raw[:sent])
    return sock


def in_form(answer: httpx2.Response, operation: Operation, status: int, code: str) -> dict[str, Any]:
    """The error of an answer, in the form of the operation's own protocol."""
    error, body = refused(answer, status), answer.json()
    assert error["code"] == code, error
    if operation.path.startswith("/v1/messages"):
        assert body == {"type": "error", "error": error, "request_id": answer.headers["request-id"]}
        assert error["type"] == ANTHROPIC_TYPES.get(status, "invalid_request_error")
    else:
        assert body == {"error": error}
        assert "request-id" not in answer.headers
        assert error["type"] == "invalid_request_error"
    assert {"type", "message", "param", "code"} <= error.keys()
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.content) < 1_500
    return error


# Where the header `anthropic-version` decides, and where it does not matter.
_IN_EITHER_FORM = ("/v1/messages", "/v1/estimate", "/v1/documents")


def forms(server: LiveServer, operation: Operation) -> None:
    path = operation.path.format(id="resp_1")
    for method in ("PUT", "PATCH", "TRACE", "OPTIONS", "QUERY", "M" * 900):
        answer = server.http.request(method, path, headers=ANN)
        assert operation.method in answer.headers["allow"].split(", "), "all methods of the path"
        error = in_form(answer, operation, 405, "method_not_allowed")
        assert error["message"].endswith(f"Send {answer.headers['allow']}.")
    strange = ANN | {"anthropic-version": "2023-06-01"}
    in_form(
        server.http.request(operation.method, f"{path}/a/b%2e/{'x' * 900}", headers=ANN), operation, 404, "not_found"
    )
    anthropic = replace(operation, path="/v1/messages/x")
    in_form(server.http.request(operation.method, "/v1/nothing", headers=strange), anthropic, 404, "not_found")
    keyless = server.http.request(operation.method, path, headers=JSON | {"anthropic-version": "2023-06-01"})
    error = refused(keyless, 401)
    assert ("request_id" in keyless.json()) is operation.path.startswith(_IN_EITHER_FORM), error
    if operation.fields is None:
        return
    long = "m" * 9_000
    named = (("m" * 200, 404, "model_not_found"), (long, 400, "invalid_value"), (7, 400, "invalid_type"))
    for model, status, code in named:
        error = in_form(send(server, operation, operation.raw(model=model)), operation, status, code)
        assert error["param"] == "model"
        assert status == 404 or " must " in error["message"]
    in_form(send(server, operation, operation.raw(**{long: 1})), operation, 400, "unknown_parameter")
    in_form(send(server, operation, operation.raw()[:-1]), operation, 400, "invalid_json")
    in_form(send(server, operation, b'{"' + b"k" * 9_000), operation, 400, "invalid_json")
    plain = {"Content-Type": "font/woff; a=" + "b" * 900}
    in_form(send(server, operation, operation.raw(), **plain), operation, 415, "unsupported_media_type")
    squeezed = {"Content-Encoding": "gzip"}
    in_form(send(server, operation, operation.raw(), **squeezed), operation, 415, "unsupported_content_encoding")
    in_form(send(server, operation, operation.raw() + b" " * LIMIT), operation, 413, "body_too_large")


def no_json(server: LiveServer, operation: Operation) -> None:
    sound = operation.raw()
    for raw in (b"", b"[]", b"{", b'"a"', b"null", b"7", sound + b"x", sound[:-1], sound.decode().encode("utf-16")):
        assert refused(send(server, operation, raw))["code"] in ("invalid_json", "invalid_type"), raw
    for raw in (b"\xef\xbb\xbf" + sound, b'{"model":NaN}', b'{"model":"\\ud800"}', b'{"model":"\xff"}', b'{"a":1e,}'):
        assert refused(send(server, operation, raw))["code"] == "invalid_json", raw


def media_types(server: LiveServer, operation: Operation) -> None:
    for kind in ("font/woff", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "a" * 900):
        refused(send(server, operation, operation.raw(), **{"Content-Type": kind}), 415)
    for coding in ("gzip", "br", "zstd", "identity, deflate", "x" * 900):
        refused(send(server, operation, operation.raw(), **{"Content-Encoding": coding}), 415)


def too_long(server: LiveServer, operation: Operation) -> None:
    refused(send(server, operation, operation.raw() + b" " * LIMIT), 413)
    chunks = (b" " * 20_000 for _ in range(30))
    headers = JSON | ANN
    answer = server.http.request(operation.method, operation.path, content=chunks, headers=headers)
    refused(answer, 413)


def deep(server: LiveServer, operation: Operation) -> None:
    for start, unit, end in ((b'{"zz":', b"[", b""), (b'{"zz":', b'{"a":', b""), (b'{"zz":', b"[", b"]")):
        for levels in (300, 2_000, 50_000):
            body = start + unit * levels + (b"1" + end * levels + b"}" if end else b"")
            refused(send(server, operation, body))
    for levels in (65, 300, 900):
        nested = b'{"a":' * levels + b"1" + b"}" * levels
        refused(send(server, operation, operation.raw()[:-1] + b',"%s":%s}' % (operation.many.encode(), nested)))


def many(server: LiveServer, operation: Operation) -> None:
    for unit in (b"{}", b"[]", b'""', b"null", b"1.5", b'{"type":"a"}', b'{"role":"user"}'):
        start = operation.raw()[:-1] + b',"%s":[' % operation.many.encode()
        refused(send(server, operation, start + (unit + b",") * (LIMIT // 2 // len(unit)) + b"{}]}"))
    refused(send(server, operation, b"{" + b'"zz":1,' * 30_000 + b'"zz":1}'))
    refused(send(server, operation, b"{" + b",".join(b'"z%d":null' % n for n in range(20_000)) + b"}"))


def numbers(server: LiveServer, operation: Operation) -> None:
    outer, _, inner = operation.number.partition(".")
    for number in ("1e400", "-1E400", "NaN", "Infinity", "9" * 4_000, "-2", "1.5", '"1"', "true", "[1]", "{}", "0x1"):
        value = f'{{"type":"enabled","{inner}":{number}}}' if inner else number
        value = f"[{number}]" if operation.number == "tokens" else value
        body = operation.raw()[:-1] + f',"{outer}":{value}}}'.encode()
        error = refused(send(server, operation, body))
        assert str(error["param"]).startswith(outer) or error["code"] == "invalid_json", error


def names(server: LiveServer, operation: Operation) -> None:
    for name, status in (("f\x00\r\n", 200), ("\x7f\u2028🦉", 200), ("x" * 2_000, 400), ("x" * 80_000, 400)):
        if "input" in (operation.fields or {}):
            called = {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}
            fields: dict[str, Any] = {"input": [USER, called]}
        else:
            called = {"type": "tool_use", "id": name, "name": name, "input": {}}
            answered = {"type": "tool_result", "tool_use_id": name}
            turns = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [answered]}]
            fields = {"messages": [USER, *turns]}
        answer = send(server, operation, operation.raw(**fields))
        assert answer.status_code == status, answer.text[:300]
        if status == 400:
            assert refused(answer)["param"].split(".")[0] in fields
    raw = operation.raw().replace(b"Hi", b"\\udc00").replace(b"Hello", b"\\udc00")
    assert refused(send(server, operation, raw))["code"] == "invalid_json"


def pictures(server: LiveServer, operation: Operation) -> None:
    for data in ("AAAA", "A" * 200_000):
        source = {"type": "base64", "media_type": "image/png", "data": data}
        parts: list[dict[str, Any]]
        if "input" in (operation.fields or {}):
            parts = [{"type": "input_image", "image_url": data}, {"type": "input_file", "file_data": data}]
        elif operation.method == "POST" and operation.path.startswith("/v1/messages"):
            kinds = [{"type": kind, "source": source} for kind in ("image", "document", "search_result")]
            parts = [*kinds, {"type": "tool_result", "tool_use_id": "t", "content": kinds[:1]}]
        else:
            parts = [{"type": "image_url", "image_url": {"url": data}}, {"type": "input_audio", "input_audio": {}}]
        field = "input" if "input" in (operation.fields or {}) else "messages"
        for part in parts:
            error = refused(send(server, operation, operation.raw(**{field: [{"role": "user", "content": [part]}]})))
            assert error["param"].startswith(f"{field}.0.content"), error


def signatures(server: LiveServer, operation: Operation) -> None:
    """Reasoning that a signature hides: it is read if it is ours, and forgotten if it is not."""
    for signature, longer in (
        ("longreach.1." + "QUFB" * 5_000, True),
        ("QU B" * 30_000, False),
        ("longreach.1.é", False),
    ):
        thought = {"type": "thinking", "thinking": "", "signature": signature}
        blocks = [thought, {"type": "redacted_thinking", "data": signature}, {"type": "text", "text": "a"}]
        turns = [USER, {"role": "assistant", "content": blocks}, USER]
        answer = send(server, operation, operation.raw(messages=turns))
        assert answer.status_code == 200, answer.text[:300]
        told = answer.json()
        assert (told.get("input_tokens", told.get("usage", {}).get("input_tokens")) > 5_000) is longer


def any_length(server: LiveServer, operation: Operation) -> None:
    """What is told again, and kept, has integers as they came."""
    long = int("7" * 60)
    function = {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"maximum": long}}},
    }
    fields = [
        {"tools": [function]},
        {"tools": [{**function, "output_schema": long}]},
        {"tools": [{"type": "custom", "name": "f", "allowed_callers": long}]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [function]}]},
        {
            "tools": [function],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**function, "z": long}]},
        },
    ]
    for one in fields:
        for how in ({}, {"stream": True}, {"background": True}):
            answer = send(server, operation, operation.raw(max_output_tokens=1, **one, **how))
            assert answer.status_code == 200, answer.text[:300]
            assert str(long) in answer.text
            if not how:
                kept = server.http.get(f"/v1/responses/{answer.json()['id']}", headers=ANN)
                assert kept.json() == answer.json()


def keys(server: LiveServer, operation: Operation) -> None:
    path, raw = operation.path.format(id="resp_1"), operation.raw()
    for headers in (
        {},
        {"Authorization": "Bearer secret-of-eve"},
        {"Authorization": "Basic secret-of-ann"},
        {"x-api-key": "secret-of-ann\x7f"},
        {**ANN, "x-api-key": "secret-of-bob"},
    ):
        refused(server.http.request(operation.method, path, content=raw, headers=JSON | headers), 401)


def ids_of_another(server: LiveServer, operation: Operation) -> None:
    begun = send(server, OPERATIONS["responses"], OPERATIONS["responses"].raw(max_output_tokens=1)).json()["id"]
    path = operation.path.format(id=begun)
    error = refused(server.http.request(operation.method, path, headers=BOB), 404)
    assert error["message"] == f"There is no response '{begun}'."
    assert server.http.get(f"/v1/responses/{begun}", headers=ANN).status_code == 200


def odd_paths(server: LiveServer, operation: Operation) -> None:
    for name in (
        "%2e%2e",
        "%00",
        "%ff",
        "a%2fb",
        "..%2f..%2fetc%2fpasswd",
        "resp_%0d%0aX:y",
        "x" * 5_000,
        "'--",
        "%25",
    ):
        answer = server.http.request(operation.method, operation.path.format(id=name), headers=ANN)
        error = refused(answer, 404)
        assert error["code"] in ("response_not_found", "not_found")
        assert "\n" not in error["message"]
        assert "X" not in answer.headers


def half_a_body(server: LiveServer, operation: Operation) -> None:
    raw = operation.raw(user="a" * 100_000)
    for sent in (0, 1, 50_000, len(raw) - 1):
        connect(server, operation, raw, sent).close()


def half_an_answer(server: LiveServer, operation: Operation) -> None:
    server.engine.hold_decode_after = 1
    before = len(server.engine.cancelled)
    for count, stream in enumerate((False, True), start=1):
        fields = {} if "max_tokens" not in operation.raw().decode() else {"max_tokens": 50}
        with connect(server, operation, operation.raw(stream=stream, ignore_eos=True, **fields)) as sock:
            eventually(lambda: bool(server.engine.running))
            if stream:
                assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        eventually(lambda n=count: len(server.engine.cancelled) == before + n)
    server.engine.hold_decode_after = None


def flood(server: LiveServer, operation: Operation) -> None:
    socks = [connect(server, operation, operation.raw() if operation.fields else b"") for _ in range(40)]
    for sock in socks:
        status = int(sock.recv(64).split()[1])
        assert status in (200, 201, 429), status
        sock.close()


def unread(server: LiveServer, operation: Operation) -> None:
    echoed, server.engine.answer, server.engine.burst = server.engine.answer, lambda request: [5] * 60_000, 20
    before = len(server.engine.cancelled)
    fields = {"max_tokens": 60_000} if "max_tokens" in (operation.fields or {}) else {}
    with connect(server, operation, operation.raw(stream=True, **fields)):
        eventually(lambda: len(server.engine.cancelled) == before + 1, 30)
    server.engine.answer, server.engine.burst = echoed, 1


ATTACKS: dict[str, Callable[[LiveServer, Operation], None]] = {
    "refusals in the form of the protocol": forms,
    "bodies that are no JSON": no_json,
    "other media types and codings": media_types,
    "bodies that are too long": too_long,
    "deep nesting": deep,
    "many small things": many,
    "odd numbers": numbers,
    "odd names and ids": names,
    "pictures and documents": pictures,
    "long signatures": signatures,
    "numbers of any length": any_length,
    "no key, and two": keys,
    "ids of another key": ids_of_another,
    "odd paths": odd_paths,
    "callers who leave with half a body": half_a_body,
    "callers who leave with half an answer": half_an_answer,
    "a flood": flood,
    "readers who do not read": unread,
}


def test_the_table_has_every_operation_and_every_attack(live: LiveServer) -> None:
    paths = live.http.get("/openapi.json", headers=ANN).json()["paths"]
    documented = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    ours = {(one.method, one.path.replace("{id}", "{response_id}")) for one in OPERATIONS.values()}
    assert ours <= documented
    # What is left has no JSON and names nothing, but for requests, documents and files: `test_identified.py` and the
    # tests of documents have another key ask for them.
    elsewhere = ("/v1/requests/", "/v1/documents/", "/v1/files", "/v1/text")
    left = {(method, path) for method, path in documented - ours if not path.startswith(elsewhere)}
    assert all(method == "GET" and "response" not in path for method, path in left)
    assert TABLE.keys() == ATTACKS.keys()
    assert {name for names in TABLE.values() for name in names} == OPERATIONS.keys()


@pytest.mark.parametrize(("attack", "name"), [(attack, name) for attack, names in TABLE.items() for name in names])
def test_somebody_else_is_served_and_nothing_stays(live: LiveServer, attack: str, name: str) -> None:
    other = json.dumps({"model": MODEL, "prompt": "The owl", "max_tokens": 1})
    with ThreadPoolExecutor(1) as pool, LoopWatch(live) as watch:
        attacking = pool.submit(ATTACKS[attack], live, OPERATIONS[name])
        while True:
            over = attacking.done()
            assert live.http.post("/v1/completions", content=other, headers=JSON | BOB).status_code == 200
            if over:
                break
        attacking.result()
    assert watch.longest < LONGEST
    eventually(lambda: live.idle and not live.engine.places and not live.service.bodies.total)
    eventually(lambda: live.service.open_requests == 0 and not live.service.encoding.waiting_bytes)
    assert live.engine.alive
