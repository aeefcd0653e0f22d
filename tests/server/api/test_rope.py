"""The field `rope`: which rotary table a request takes, what is told of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from longreach.engine.rope_choice import RopeTable

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_chat import TEMPLATE
from tests.server.api.told import error_of

TABLES = [RopeTable(1.0, 128), RopeTable(2.0, 256), RopeTable(4.0, 512)]
PROMPT = [*range(5, 55)]  # 50 tokens, and 32 for an answer in any case


@pytest.fixture
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, max_model_len=512) as server:
        server.engine.info = msgspec.structs.replace(server.engine.info, rope_tables=TABLES)
        yield server


def taken(server: LiveServer, **fields: Any) -> tuple[float, int]:
    """The factor of a request, as its usage says it, too, and the tokens that its answer may have."""
    response = server.complete(**{"prompt": PROMPT} | fields)
    assert response.status_code == 200, response.text
    request = server.engine.requests[-1]
    assert response.json()["usage"]["rope_factor"] == request.rope_factor
    return request.rope_factor, request.max_tokens


def test_a_request_takes_the_first_table_that_holds_it(live: LiveServer) -> None:
    assert taken(live, max_tokens=78) == (1, 78)
    assert taken(live, max_tokens=79) == (2, 79)
    assert taken(live, max_tokens=462, rope="auto") == (4, 462)
    assert taken(live, prompt=[*range(5, 101)], max_tokens=1) == (1, 1), "96 tokens, and a quarter of 128"
    assert taken(live, prompt=[*range(5, 102)], max_tokens=1) == (2, 1)


def test_an_answer_without_a_bound_ends_with_its_table(live: LiveServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    answer = live.http.post("/v1/chat/completions", json=body).json()
    request = live.engine.requests[-1]
    assert (request.rope_factor, len(request.prompt) + request.max_tokens) == (1, 128)
    assert answer["usage"]["rope_factor"] == 1
    live.http.post("/v1/chat/completions", json={**body, "rope": 4})
    request = live.engine.requests[-1]
    assert (request.rope_factor, len(request.prompt) + request.max_tokens) == (4, 512)


def test_a_request_may_name_its_table(live: LiveServer) -> None:
    assert taken(live, prompt=[*range(5, 105)], max_tokens=1) == (2, 1)
    assert taken(live, prompt=[*range(5, 105)], max_tokens=1, rope="native") == (1, 1)
    assert taken(live, max_tokens=1, rope=4) == (4, 1)
    assert taken(live, max_tokens=1, rope=1.0) == (1, 1)


def test_each_prompt_has_its_own_and_the_greatest_is_told(live: LiveServer) -> None:
    response = live.complete(prompt=[PROMPT, [*range(5, 205)]], max_tokens=2)
    assert [request.rope_factor for request in live.engine.requests] == [1, 2]
    assert response.json()["usage"]["rope_factor"] == 2


def test_messages_and_responses_tell_it(live: LiveServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400}
    answer = live.http.post("/v1/messages", json=body)
    assert answer.json()["usage"]["rope_factor"] == 4, "room for all that may be answered"
    answer = live.http.post("/v1/messages", json=body | {"rope": "native"})
    assert answer.status_code == 200, "`max_tokens` is a bound there, and reserves nothing"
    request = live.engine.requests[-1]
    assert (request.rope_factor, len(request.prompt) + request.max_tokens) == (1, 128)
    answer = live.http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "max_output_tokens": 200})
    assert answer.json()["usage"]["rope_factor"] == 2


def test_an_estimate_looks_for_pages_of_the_same_table(live: LiveServer) -> None:
    for tokens, factor in ((78, 1), (79, 2)):
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens}
        assert live.http.post("/v1/estimate", json=body).status_code == 200
        assert live.engine.look_factors[-1] == factor


def test_a_document_is_read_under_the_table_of_its_length(live: LiveServer) -> None:
    body = {"model": MODEL, "token_ids": [*range(5, 205)], "use": "completion", "pin": True, "wait": True}
    kept = live.http.post("/v1/documents", json=body).json()
    assert live.engine.requests[-1].rope_factor == 2
    assert live.engine.pin_factors == [2]
    live.http.get(f"/v1/documents/{kept['id']}")
    assert live.engine.look_factors == [2]
    assert taken(live, prompt=[7, 8], document=kept["id"], max_tokens=3) == (2, 3), "and so is a question about it"


def test_a_prompt_is_compared_with_those_of_its_table(live: LiveServer) -> None:
    live.complete(prompt=PROMPT, max_tokens=2)
    for tokens, seen in ((2, 50), (79, 0)):
        answer = live.complete(prompt=PROMPT, max_tokens=tokens, return_cache_usage=True)
        assert answer.json()["usage"]["cache"]["seen"] == seen


def test_models_lists_the_tables(live: LiveServer, server: LiveServer) -> None:
    listed = live.http.get("/v1/models").json()["data"][0]["rope_tables"]
    assert listed[1] == {"factor": 2.0, "max_tokens": 256}
    assert server.http.get("/v1/models").json()["data"][0]["rope_tables"] is None


@pytest.mark.parametrize(
    ("fields", "code", "why"),
    [
        ({"rope": 3}, "unsupported_value", "no rotary frequencies of the factor 3; this server has native, 2, 4"),
        ({"rope": "native", "max_tokens": 79}, "context_length_exceeded", "are for 128 tokens, and `prompt` and its"),
        ({"rope": 0.5}, "invalid_value", "rope"),
        ({"rope": "yarn"}, "invalid_value", "rope"),
        ({"rope": True}, "invalid_value", "rope"),
    ],
)
def test_what_there_is_not_is_refused(live: LiveServer, fields: dict[str, Any], code: str, why: str) -> None:
    response = live.complete(**{"prompt": PROMPT, "max_tokens": 1} | fields)
    error = error_of(response, 400, code)
    assert error["param"].partition(".")[0] == "rope"
    assert why in error["message"]
    eventually(lambda: live.idle)


@pytest.mark.parametrize("rope", ["auto", "native", 2])
def test_a_server_with_one_set_of_frequencies_takes_no_choice(server: LiveServer, rope: object) -> None:
    error = error_of(server.complete(rope=rope), 400, "unsupported_value")
    assert error["param"] == "rope"
    assert "--rope auto" in error["message"]
    assert "rope_factor" not in server.complete().json()["usage"]
