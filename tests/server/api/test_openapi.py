"""The OpenAPI document says what the server does: schemathesis sends what it allows, and what it does not.

`make test` sends a few hundred requests to a server without a model. `make soak` sends thousands to the embedded model:
LONGREACH_SCHEMA_CASES of each kind to each operation, and writes how they were answered to LONGREACH_SCHEMA_RESULT.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from longreach.bench.summary import environment

pytest.importorskip("jsonschema", reason="jsonschema is not installed (it is in the dev extra)")
pytest.importorskip("schemathesis", reason="schemathesis is not installed (it is in the dev extra)")
import jsonschema
import schemathesis
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.api.conftest import LiveServer, eventually
from tests.server.api.embedded import EmbeddedServer
from tests.server.api.test_chat import TEMPLATE

SOAK_CASES = os.environ.get("LONGREACH_SCHEMA_CASES")
CASES = int(SOAK_CASES or "12")
RESULT = os.environ.get("LONGREACH_SCHEMA_RESULT")
# Bodies of these have so many members that one takes as long to make up as several of the others.
SLOW = ("/v1/messages", "/v1/messages/count_tokens", "/v1/documents")
CHECKS = [
    schemathesis.checks.not_a_server_error,  # pyright: ignore[reportAttributeAccessIssue]
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPERATIONS = [
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel",
    "GET /v1/responses/{response_id}/input_items",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/documents",
    "GET /v1/documents",
    "GET /v1/documents/{document_id}",
    "POST /v1/documents/{document_id}",
    "DELETE /v1/documents/{document_id}",
    "POST /v1/estimate",
    "POST /v1/text",
    "POST /v1/files",
    "GET /v1/files",
    "GET /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content",
    "DELETE /v1/files/{file_id}",
    "GET /v1/requests/{key}",
    "DELETE /v1/requests/{key}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /tokenizer_info",
    "GET /v1/attention/policies",
    "GET /v1/attention/mask",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /health",
    "GET /ready",
    "GET /version",
    "GET /metrics",
]


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer | EmbeddedServer]:
    if SOAK_CASES is None:
        with make_server(template=TEMPLATE, max_model_len=2048, allow_priority=True) as server:
            yield server
    else:
        with EmbeddedServer(max_model_len=96, kv_cache_memory="16MiB", allow_priority=True) as server:
            yield server


@pytest.fixture(scope="module")
def answered() -> Iterator[dict[str, Counter[int]]]:
    """How many requests of each operation had which status."""
    counts: dict[str, Counter[int]] = {}
    yield counts
    if RESULT is not None:
        by_status = {operation: {str(k): n for k, n in sorted(found.items())} for operation, found in counts.items()}
        requests = sum(found.total() for found in counts.values())
        result = {"environment": environment(), "requests": requests, "answers": by_status}
        Path(RESULT).write_text(json.dumps(result, indent=1) + "\n")


def document(live: LiveServer | EmbeddedServer) -> dict[str, Any]:
    return live.http.get("/openapi.json").json()


def test_every_operation_is_documented_with_its_body_and_answers(live: LiveServer | EmbeddedServer) -> None:
    paths = document(live)["paths"]
    assert sorted(f"{m.upper()} {path}" for path, methods in paths.items() for m in methods) == sorted(OPERATIONS)
    schemas = document(live)["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "ResponseRequest", "TokenizeRequest", "DetokenizeRequest"):
        assert schemas[name]["additionalProperties"] == {"type": "null"}
    assert {"prompt", "max_tokens", "stop", "logit_bias", "return_progress"} <= set(
        schemas["CompletionRequest"]["properties"]
    )
    described = [p for p in schemas["ChatRequest"]["properties"].values() if "description" in p]
    assert len(described) > 30
    # FastAPI's own 422 is none of ours.
    refusing = {path for path, methods in paths.items() for one in methods.values() if "422" in one["responses"]}
    assert refusing == {f"/v1/{name}" for name in ("completions", "chat/completions", "responses", "messages")}
    assert "HTTPValidationError" not in json.dumps(document(live))


def test_every_reference_resolves(live: LiveServer | EmbeddedServer) -> None:
    whole = document(live)
    text = json.dumps(whole)
    names = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names
    assert names <= set(whole["components"]["schemas"])


@pytest.mark.parametrize("operation", ["completions", "chat/completions", "responses", "messages", "tokenize"])
def test_a_null_is_taken_where_the_document_says_so(live: LiveServer | EmbeddedServer, operation: str) -> None:
    path = operation if operation == "tokenize" else f"v1/{operation}"
    whole = document(live)
    schema = whole["paths"][f"/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = whole["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    name = next(name for name in ("messages", "input", "prompt") if name in properties)
    simple = {name: SIMPLE["messages"]["const"] if name == "messages" else "Hello"}
    if "model" in properties:
        simple["model"] = live.service.settings.name
    if operation == "messages":
        simple["max_tokens"] = 5
    validator = jsonschema.Draft202012Validator({**whole, **schema})
    for field in properties.keys() - simple.keys():
        body = {**simple, field: None}
        answer = live.http.post(f"/{path}", json=body)
        assert (answer.status_code == 200) == validator.is_valid(body), (field, answer.text)


def _has_whole_float(value: object) -> bool:
    """Whether there is a number such as 1.0: an integer to JSON Schema, and refused here for its point."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return (isinstance(value, float) and value.is_integer()) or any(map(_has_whole_float, inside))


# Fields that refuse each other, or that are refused by what the schema cannot say: the template, the context's length.
EXCLUSIVE = {
    *("regex", "grammar", "response_format", "text", "tools", "tool_choice", "functions", "function_call"),
    *("min_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "best_of", "logprobs", "top_logprobs"),
    *("stream_options", "return_progress", "reasoning", "reasoning_effort", "enable_thinking", "stop_token_ids"),
    *("previous_response_id", "background"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    *("ebnf", "prompt_logprobs", "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "n_predict"),
    *("thinking", "chat_template_kwargs", "documents", "verbosity", "continue_final_message"),
    *("add_generation_prompt", "separate_reasoning", "include_reasoning"),
    "logit_bias",
    *("attention", "rope"),
    "output_config",
    "output_format",
    "thread",
    *("document", "token_ids", "use"),
}
ANY = {200, 201, 400, 404, 409, 413, 415, 422}
# Short enough for the soak's context of 96 tokens, whatever bytes the characters have.
SIMPLE: dict[str, Any] = {
    "prompt": {"type": "string", "minLength": 1, "maxLength": 16},
    "messages": {"const": [{"role": "user", "content": "Hello"}]},
    "input": {"type": "string", "minLength": 1, "maxLength": 16},
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 399}},
}


def _passes(
    whole: dict[str, Any], method: str
) -> Iterator[tuple[schemathesis.GenerationMode, dict[str, Any], set[int]]]:
    """What is sent: anything that is described; for a body also what is not, and what must be answered."""
    [operations] = whole["paths"].values()
    if "requestBody" not in operations[method.lower()]:
        named = "{" in str(*whole["paths"]) or "after" in str(operations)  # what there is not is not found
        yield schemathesis.GenerationMode.POSITIVE, whole, {200, 404} if named else {200}
        return
    yield schemathesis.GenerationMode.POSITIVE, whole, ANY
    yield schemathesis.GenerationMode.NEGATIVE, whole, ANY
    [content] = operations[method.lower()]["requestBody"]["content"].items()
    if content[0] != "application/json" or "anyOf" in content[1]["schema"]:
        return  # a file of any bytes is no text; and what is simple differs from body to body
    plain = copy.deepcopy(whole)
    plain["paths"][next(iter(plain["paths"]))][method.lower()].pop("parameters", None)  # a key is good for one body
    for schema in (s for name, s in plain["components"]["schemas"].items() if name.endswith("Request")):
        for name in EXCLUSIVE & schema.get("properties", {}).keys():
            if name not in schema.get("required", []):
                del schema["properties"][name]
        name = next(name for name in SIMPLE if name in schema["properties"])
        schema["properties"] = {**schema["properties"], name: SIMPLE[name]}
        schema["required"] = [*{*schema.get("required", []), name}]
        if name != "messages":
            schema["properties"].pop("messages", None)
    done = {200, 404} if "{" in str(*whole["paths"]) else {200, 201}
    yield schemathesis.GenerationMode.POSITIVE, plain, done


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_request_that_the_document_describes_goes_wrong(
    live: LiveServer | EmbeddedServer, operation: str, answered: dict[str, Counter[int]]
) -> None:
    whole, name = document(live), live.service.settings.name
    for schema in whole["components"]["schemas"].values():
        properties = schema.get("properties", {})
        properties.pop("deadline_ms", None)  # one that is missed is a 504; `test_estimate` has them
        if "model" in properties and schema.get("additionalProperties") == {"type": "null"}:
            # Any other is a 404, and says nothing of the rest.
            properties["model"] = {"enum": [name] if "model" in schema.get("required", []) else [name, None]}
    method, path = operation.split(" ")
    whole["paths"] = {path: {method.lower(): whole["paths"][path][method.lower()]}}
    for mode, described, allowed in _passes(whole, method):
        _send_many(live, mode, described, allowed, answered.setdefault(operation, Counter()))
    eventually(lambda: live.idle)
    assert live.engine.alive


def _send_many(
    live: LiveServer | EmbeddedServer,
    mode: schemathesis.GenerationMode,
    described: dict[str, Any],
    allowed: set[int],
    answered: Counter[int],
) -> None:
    """Send CASES requests, or fewer, of one mode to the one operation that is described, and check each answer."""
    [result] = schemathesis.openapi.from_dict(described).get_all_operations()
    assert isinstance(result, Ok)
    chosen = result.ok()
    cases = CASES // 4 if chosen.path in SLOW and SOAK_CASES is None else CASES

    @hypothesis.settings(max_examples=cases, deadline=None, suppress_health_check=[*hypothesis.HealthCheck])
    @hypothesis.given(case=chosen.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        hypothesis.assume(not _has_whole_float(case.body))
        answer = case.call_and_validate(base_url=live.url, checks=CHECKS, timeout=600)
        answered[answer.status_code] += 1
        assert answer.status_code in allowed, answer.text

    send()
