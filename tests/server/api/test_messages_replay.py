"""A conversation in Anthropic's protocol, replayed to the byte: a stream with reasoning and a call, and the next turn.

The recording is `recorded/messages.txt`: requests and the events of their answers by turns. After a change of the
protocol that is meant, write it anew with LONGREACH_RECORD=1, and read what has changed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.anthropic_client import CALL, TEMPLATE, WEATHER, events_of, told_by
from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import says

RECORDING = Path(__file__).parent / "recorded" / "messages.txt"
RECORD = "LONGREACH_RECORD" in os.environ
MARK = "=== "
ID = re.compile(r'"id":"(msg|call)_[0-9a-f]+"')


@pytest.fixture
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, max_model_len=4096, served_model_name=f"claude-owl,{MODEL}") as server:
        server.engine.cached = 16
        yield server


def without_ids(events: str) -> str:
    """The events of an answer with masked ids, which are drawn anew each time."""
    return ID.sub(lambda found: f'"id":"{found[1]}_0"', events)


def said(live: LiveServer, tokenizer: Tokenizer, body: dict[str, Any], answer: str) -> str:
    """The events of the answer to a request, where the model says this."""
    says(live, tokenizer, answer)
    return without_ids(live.http.post("/v1/messages?beta=true", json=body).text)


def test_a_conversation_is_replayed_to_the_byte(live: LiveServer, tokenizer: Tokenizer) -> None:
    first: dict[str, Any] = {
        "model": "claude-owl",
        "max_tokens": 200,
        "stream": True,
        "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "How is Oslo?"}],
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 64},
    }
    begun = said(live, tokenizer, first, f"<think>I must look.</think>Let me see.{CALL}")
    message = told_by(events_of(begun))
    result = {"type": "tool_result", "tool_use_id": message["content"][-1]["id"], "content": "rain"}
    turns = [
        *first["messages"],
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    second = {**first, "messages": turns}
    ended = said(live, tokenizer, second, "<think>So it rains.</think>Oslo has rain 🌧.")
    pieces = [("request", json.dumps(first, indent=1, ensure_ascii=False) + "\n"), ("answer", begun)]
    pieces += [("request", json.dumps(second, indent=1, ensure_ascii=False) + "\n"), ("answer", ended)]
    replayed = "".join(f"{MARK}{name}\n{text}" for name, text in pieces)
    if RECORD:
        RECORDING.write_text(replayed)
    assert replayed == RECORDING.read_text()
