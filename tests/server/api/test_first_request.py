"""The command that the log offers, word by word."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from longreach.api.service.first_request import first_request


def words(url: str = "http://127.0.0.1:8000", model: str = "m", **changed: bool) -> list[str]:
    facts = {"embedded": False, "has_chat": True, "needs_key": False, **changed}
    return shlex.split(first_request(url, model, **facts)[0])


def body(of: list[str]) -> dict[str, Any]:
    return json.loads(of[of.index("-d") + 1])


def test_the_embedded_model_is_asked_for_a_fact_under_any_name() -> None:
    command, answer = first_request("http://x:1", "owl", embedded=True, has_chat=True, needs_key=False)
    asked = body(shlex.split(command))
    assert "\n" not in command
    assert shlex.split(command)[:2] == ["curl", "http://x:1/v1/completions"]
    assert (asked["model"], asked["temperature"]) == ("owl", 0)
    assert answer is not None
    assert f"is {answer}." in asked["prompt"]


@pytest.mark.parametrize(
    ("has_chat", "path", "member"), [(True, "chat/completions", "messages"), (False, "completions", "prompt")]
)
def test_another_model_is_asked_as_it_can_be(has_chat: bool, path: str, member: str) -> None:
    found = words(has_chat=has_chat)
    assert found[:3] == ["curl", "-N", f"http://127.0.0.1:8000/v1/{path}"]
    assert body(found)[member]
    assert body(found)["stream"] is True


def test_a_key_has_a_place_in_the_command() -> None:
    assert "Authorization: Bearer KEY" in words(needs_key=True)
    assert "Authorization" not in " ".join(words())


def test_https_is_asked_at_an_address_that_no_certificate_is_for() -> None:
    assert words("https://127.0.0.1:8443")[1:4] == ["-N", "--insecure", "https://127.0.0.1:8443/v1/chat/completions"]


@pytest.mark.parametrize(("listens", "asked"), [("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]"), ("10.0.0.7", "10.0.0.7")])
def test_the_address_can_be_connected_to(listens: str, asked: str) -> None:
    assert words(f"http://{listens}:8000")[2] == f"http://{asked}:8000/v1/chat/completions"


def test_quotes_in_a_model_name_survive_the_shell() -> None:
    assert body(words(model='it\'s "mine" $HOME'))["model"] == 'it\'s "mine" $HOME'
