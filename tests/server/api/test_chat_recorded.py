"""A conversation with tools in `/v1/chat/completions`, replayed to the byte: as a stream, and as whole answers.

Ids and times differ between runs, and are masked. After an intended change, run with LONGREACH_RECORD=1 and read the
difference of the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import TEMPLATE, WEATHER, prompt_of, says

RECORDED = Path(__file__).parent / "recorded" / "chat.txt"
_ID = re.compile(r"\b(chatcmpl-|call_)[0-9a-f]{24,32}\b")
_TIME = re.compile(r'"created":\d+')
CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city":  "Köln \\u00e9", "n": 18446744073709551616}}\n</tool_call>'
)


def masked(text: str) -> str:
    """The text with ids that are numbered in their order, and without times."""
    numbers: dict[str, str] = {}
    text = _ID.sub(lambda found: numbers.setdefault(found[0], f"{found[1]}{len(numbers)}"), text)
    return _TIME.sub('"created":0', text)


def test_a_recorded_conversation_is_replayed_to_the_byte(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer
) -> None:
    turns: list[Any] = [{"role": "user", "content": "Hello"}]
    fields: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
    told: list[str] = []
    with make_server(template=TEMPLATE) as server:
        server.engine.burst = 9
        for words in (f"<think>Hm.</think>I look.\n{CALL}\n{CALL}", "<tool_call>{'name': 'weather'}</tool_call> Cold."):
            says(server, tokenizer, words)
            for stream in (True, False):
                asked = {**fields, "messages": turns, "stream": stream}
                response = server.http.post("/v1/chat/completions", json=asked)
                assert response.status_code == 200, response.text
                told += [f"--- {'events' if stream else 'answer'}", response.text.rstrip("\n"), ""]
            told += ["--- prompt", prompt_of(server, tokenizer), ""]
            message = response.json()["choices"][0]["message"]
            calls = message.get("tool_calls", [])
            turns += [message, *({"role": "tool", "tool_call_id": call["id"], "content": "cold"} for call in calls)]
    text = masked("\n".join(told))
    if os.environ.get("LONGREACH_RECORD"):
        RECORDED.write_text(text)
    assert text == RECORDED.read_text()
