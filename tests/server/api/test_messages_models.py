"""`/v1/models` as Anthropic's clients see it, beside what OpenAI's see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.server.api.conftest import LiveServer
from tests.server.api.test_messages_errors import anthropic_error_of

NAMES = ["owl", "claude-owl", "acme/owl-7b"]
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def named(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(served_model_name=",".join(NAMES), max_model_len=4096) as live:
        yield live


def test_each_form_of_the_list_has_every_name(named: LiveServer) -> None:
    assert [model.id for model in named.openai.models.list().data] == NAMES
    page = named.http.get("/v1/models", headers=VERSION).json()
    assert [model["id"] for model in page["data"]] == NAMES
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "owl", "acme/owl-7b")
    one = named.http.get("/v1/models/acme/owl-7b", headers=VERSION).json()
    assert one == page["data"][2]
    assert (one["type"], one["display_name"], one["max_input_tokens"]) == ("model", "acme/owl-7b", 4095)
    assert datetime.fromisoformat(one["created_at"]).timestamp() == named.service.created


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ("limit=1", ["owl"], True),
        ("limit=1&after_id=owl", ["claude-owl"], True),
        ("limit=2&after_id=owl", ["claude-owl", "acme/owl-7b"], False),
        ("after_id=acme/owl-7b", [], False),
        ("limit=1&before_id=acme/owl-7b", ["claude-owl"], True),
        ("before_id=acme/owl-7b", ["owl", "claude-owl"], False),
        ("after_id=owl&before_id=acme/owl-7b", ["claude-owl"], False),
        ("after_id=claude-owl&before_id=owl", [], False),
        ("limit=1000&lifecycle=active", NAMES, False),
    ],
)
def test_a_list_has_pages(named: LiveServer, query: str, ids: list[str], more: bool) -> None:
    page: dict[str, Any] = named.http.get(f"/v1/models?{query}", headers=VERSION).json()
    assert [model["id"] for model in page["data"]] == ids
    assert page["has_more"] == more
    assert [page["first_id"], page["last_id"]] == ([ids[0], ids[-1]] if ids else [None, None])


@pytest.mark.parametrize(("name", "value"), [("limit", "0"), ("limit", "x"), ("limit", "1001"), ("after_id", "tiny")])
def test_a_page_that_cannot_be_is_refused(named: LiveServer, name: str, value: str) -> None:
    answer = named.http.get(f"/v1/models?{name}={value}", headers=VERSION)
    assert anthropic_error_of(answer, 400, "invalid_request_error")["param"] == name


def test_a_name_that_is_not_served_says_how_to_serve_it(named: LiveServer) -> None:
    body = {"model": "claude-sonnet-5", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
    error = anthropic_error_of(named.http.post("/v1/messages", json=body), 404, "not_found_error")
    assert "--served-model-name" in error["message"]
    assert named.http.post("/v1/messages", json={**body, "model": "claude-owl"}).json()["model"] == "claude-owl"
