"""A conversation in `/v1/responses`, replayed to the byte: a stream with a call, and the turn that answers it.

Ids and times differ between runs, and are masked. After an intended change, run with LONGREACH_RECORD=1 and read the
difference of the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import prompt_of, says
from tests.server.api.test_responses import WEATHER
from tests.server.api.test_responses_tools import PATCH, PATCHING, TOOLS_TEMPLATE

RECORDED = Path(__file__).parent / "recorded" / "responses.txt"
_ID = re.compile(r"\b([a-z]+)_[0-9a-f]{24,32}\b")
_TIME = re.compile(r'"(created_at|completed_at)":\d+')


def masked(text: str) -> str:
    """The text with ids that are numbered in their order, and without times."""
    numbers: dict[str, str] = {}
    text = _ID.sub(lambda found: numbers.setdefault(found[0], f"{found[1]}_{len(numbers)}"), text)
    return _TIME.sub(r'"\1":0', text)


def test_a_recorded_conversation_is_replayed_to_the_byte(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer
) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    turn: list[Any] = [{"role": "user", "content": "Hello"}]
    fields = {"model": MODEL, "tools": [WEATHER, PATCH], "stream": True, "temperature": 0, "store": False}
    told: list[str] = []
    with make_server(template=TOOLS_TEMPLATE) as server:
        for words in (f"<think>Hm.</think>I look. {call}{PATCHING}", "Cold."):
            says(server, tokenizer, words)
            response = server.http.post("/v1/responses", json={**fields, "input": turn})
            told += ["", f"--- prompt\n{prompt_of(server, tokenizer)}", "--- events", response.text]
            events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            output = json.loads(events[-1])["response"]["output"]
            turn += output
            turn += [
                {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "cold"}
                for item in output
                if item["type"].endswith("_call")
            ]
    text = masked("\n".join(told))
    if os.environ.get("LONGREACH_RECORD"):
        RECORDED.write_text(text)
    assert text == RECORDED.read_text()
