"""Which attack is tried on which endpoint: ONE table.

What is thrown at sockets and at HTTP itself meets no endpoint (`network`). `texts`, `sampling` and `fairness` attack a
whole server in a process of its own. What is below takes a fraction of a second each, in `test_endpoint_attacks`; what
is done to the store of responses is in `test_store_attacks`, and conversations that cost in `test_long_conversations`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MODEL = "tiny-owl"
USER = {"role": "user", "content": "Hello"}


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    Attributes:
        path: has `{id}` where a response is named.
        fields: a small sound body; None where there is none.
        many: a field that may be a list.
        number: a field that is a number, if there is one; a dot leads into an object, which is given whole.
    """

    method: str
    path: str
    fields: dict[str, Any] | None = None
    many: str = ""
    number: str = ""

    def raw(self, **fields: Any) -> bytes:
        """The sound body, with other fields."""
        return json.dumps({"model": MODEL, **(self.fields or {}), **fields}).encode()


OPERATIONS = {
    "completions": Operation("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 2}, "prompt", "max_tokens"),
    "chat": Operation("POST", "/v1/chat/completions", {"messages": [USER], "max_tokens": 2}, "messages", "max_tokens"),
    "responses": Operation("POST", "/v1/responses", {"input": "Hi"}, "input", "max_output_tokens"),
    "input_tokens": Operation("POST", "/v1/responses/input_tokens", {"input": "Hi"}, "tools"),
    "messages": Operation("POST", "/v1/messages", {"messages": [USER], "max_tokens": 2}, "messages", "max_tokens"),
    "count_tokens": Operation(
        "POST", "/v1/messages/count_tokens", {"messages": [USER]}, "system", "thinking.budget_tokens"
    ),
    "estimate": Operation("POST", "/v1/estimate", {"prompt": "Hi", "max_tokens": 2}, "prompt", "deadline_ms"),
    "documents": Operation("POST", "/v1/documents", {"text": "Hi"}, "token_ids", "ttl_seconds"),
    "tokenize": Operation("POST", "/tokenize", {"prompt": "Hi"}, "messages"),
    "detokenize": Operation("POST", "/detokenize", {"tokens": [5]}, "tokens", "tokens"),
    "retrieve": Operation("GET", "/v1/responses/{id}"),
    "delete": Operation("DELETE", "/v1/responses/{id}"),
    "cancel": Operation("POST", "/v1/responses/{id}/cancel"),
    "input_items": Operation("GET", "/v1/responses/{id}/input_items"),
    "tokenizer_info": Operation("GET", "/tokenizer_info"),
}
BODIES = tuple(name for name, operation in OPERATIONS.items() if operation.fields is not None)
GENERATING = ("completions", "chat", "responses", "messages")
OF_IDS = tuple(name for name, operation in OPERATIONS.items() if "{id}" in operation.path)
HISTORIES = ("responses", "input_tokens", "messages", "count_tokens")

TABLE: dict[str, tuple[str, ...]] = {
    "refusals in the form of the protocol": tuple(OPERATIONS),
    "bodies that are no JSON": BODIES,
    "other media types and codings": BODIES,
    "bodies that are too long": BODIES,
    "deep nesting": BODIES,
    "many small things": BODIES,
    "odd numbers": tuple(name for name, operation in OPERATIONS.items() if operation.number),
    "odd names and ids": HISTORIES,
    "pictures and documents": ("chat", *HISTORIES),
    "long signatures": ("messages", "count_tokens"),
    "numbers of any length": ("responses",),
    "no key, and two": tuple(OPERATIONS),
    "ids of another key": OF_IDS,
    "odd paths": OF_IDS,
    "callers who leave with half a body": BODIES,
    "callers who leave with half an answer": GENERATING,
    "a flood": (*BODIES, "tokenizer_info"),
    "readers who do not read": ("responses", "messages"),
}
