"""A server for benchmarks to measure: it streams as many tokens as are asked for, an event each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.server.bench.http_stub import listening

Body = dict[str, Any]
POLICIES = [{"policy": "dense"}, {"policy": "window"}, {"policy": "dynamic"}]


@contextmanager
def server(
    missing: int = 0,
    max_model_len: int = 4096,
    status: int | Callable[[Body], int] = 200,
    key: str | None = None,
    policies: list[Body] | None = None,
    tiers: bool = False,
) -> Iterator[tuple[str, list[Body]]]:
    """A server that streams all tokens but `missing`, and the requests it got.

    It asks for `key`, and has `policies`, where they are given; half of every prompt is in its cache, as it says. With
    `tiers` it says which one a request was served in.
    """
    bodies: list[Body] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def allowed(self) -> bool:
            if key is None or self.headers["Authorization"] == f"Bearer {key}":
                return True
            self.answer(401, "application/json")
            return False

        def do_GET(self) -> None:
            if not self.allowed():
                return
            known: Body = {"/v1/models": [{"id": "fake", "max_model_len": max_model_len}]}
            if policies is not None:
                known["/v1/attention/policies"] = policies
            self.answer(200 if self.path in known else 404, "application/json")
            self.wfile.write(json.dumps({"data": known.get(self.path)}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return
            bodies.append(body)
            code = status if isinstance(status, int) else status(body)
            self.answer(code, "text/event-stream")
            if code != 200:
                self.wfile.write(b"no room")
                return
            count = body["max_tokens"] - missing
            events: list[Body] = [{"choices": [{"text": ""}]}]
            events += [{"choices": [{"text": " w"}]}] * count
            cached = {"cached_tokens": len(body["prompt"]) // 2}
            events.append({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens_details": cached}})
            if tiers and "service_tier" in body:
                events = [event | {"service_tier": body["service_tier"]} for event in events]
            try:
                for event in events:
                    self.wfile.write(b": keep-alive\n\n")
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")
            except ConnectionError:
                pass  # a client that leaves is part of what is measured

    with listening(Handler) as url:
        yield url, bodies
