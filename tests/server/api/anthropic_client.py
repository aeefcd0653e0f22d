"""A client of `/v1/messages`: what it asks, and how it reads a stream."""

from __future__ import annotations

import json
from typing import Any

from tests.server.api.conftest import MODEL, LiveServer

# As Qwen's: turns between marks, reasoning and calls between tags, results as turns of their own.
TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
COUNTED = (
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"),
    *("context_management", "chat_template_kwargs"),
)
HELLO = [{"role": "user", "content": "Hello"}]


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type."""
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def told_by(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events tell of, put together as Anthropic's clients do it."""
    first, *middle, last, end = events
    assert (first["type"], last["type"], end) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    texts: list[str] = []
    is_open = False
    for event in middle:
        assert event["index"] == len(message["content"]) - (0 if event["type"] == "content_block_start" else 1)
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, texts = True, []
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_stop":
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads("".join(texts) or "{}")
        else:
            assert is_open
            assert event["type"] == "content_block_delta"
            delta = {**event["delta"]}
            kind = delta.pop("type")
            [(name, text)] = delta.items()
            assert kind == ("input_json_delta" if name == "partial_json" else f"{name}_delta")
            if name == "partial_json":
                texts.append(text)
            else:
                message["content"][-1][name] += text
    assert not is_open
    return {**message, **last["delta"], "usage": message["usage"] | last["usage"]} | (
        {"context_management": last["context_management"]} if "context_management" in last else {}
    )


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose own id and those of its calls are masked."""
    blocks = [{**block, "id": "toolu"} if "id" in block else block for block in message["content"]]
    return {**message, "id": "msg", "content": blocks}


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """The message, which the events of its own stream must tell of, too."""
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 400} | fields
    response = server.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"]
    whole = response.json()
    stream = server.http.post("/v1/messages", json={**body, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    told = told_by(events_of(stream.text))
    assert without_ids(told) == without_ids(whole)
    count = {name: body[name] for name in COUNTED if name in body}
    counted = server.http.post("/v1/messages/count_tokens", json=count).json()
    assert counted["input_tokens"] == len(server.engine.requests[-1].prompt)
    return whole


def text(words: str) -> dict[str, Any]:
    """A block of text with all that it may have."""
    return {"type": "text", "text": words, "citations": None, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
