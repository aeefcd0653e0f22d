"""LiteLLM: its `openai/` and `hosted_vllm/` providers, and its Anthropic bridge over both."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched

import litellm
from checks import FIRST, KEY, MODEL, QUESTION, SCHEMA, TOOLS, URL, WORDS, Task, check, expect, raises, run
from pydantic import BaseModel

litellm.suppress_debug_info = True
litellm.telemetry = False
ASKED: Any = [{"role": "user", "content": QUESTION}]
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
    for name, text, schema in TOOLS
]
ANTHROPIC_TOOLS: Any = [{"name": name, "description": text, "input_schema": schema} for name, text, schema in TOOLS]


class Key(BaseModel):
    kind: Literal["pass key"]
    number: int


def register(provider: str) -> None:
    """The checks over chat of one provider."""
    protocol = f"chat, `{provider}/`"
    common: Any = {"model": f"{provider}/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}

    @check(protocol, "answer", on=WORDS)
    def _() -> None:
        expect(KEY, litellm.completion(messages=ASKED, **common).choices[0].message.content)

    @check(protocol, "stream", on=WORDS)
    def _() -> None:
        chunks = litellm.completion(messages=ASKED, stream=True, stream_options={"include_usage": True}, **common)
        expect(KEY, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))

    @check(protocol, "tool loop")
    def _() -> None:
        task = Task()
        messages: Any = [{"role": "user", "content": task.prompt}]
        while True:
            message = litellm.completion(messages=messages, tools=CHAT_TOOLS, **common).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = task.run(call.function.name, json.loads(call.function.arguments))
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result}
                )
        task.finish(message.content)

    @check(protocol, "structured output")
    def _() -> None:
        made = litellm.completion(messages=ASKED, response_format=Key, **common).choices[0].message.content
        assert Key.model_validate_json(made).number == int(KEY)

    @check(protocol, "second turn, with `cache_control`")
    def _() -> None:
        first = litellm.completion(messages=ASKED, **common).choices[0].message
        marked = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        again: Any = [
            {"role": "system", "content": [marked]},
            *ASKED,
            first,
            {"role": "user", "content": FIRST},
        ]
        expect(KEY, litellm.completion(messages=again, **common).choices[0].message.content)

    @check(protocol, "errors")
    def _() -> None:
        with raises("NotFoundError", "gpt-4o"):
            litellm.completion(messages=ASKED, **{**common, "model": f"{provider}/gpt-4o"})


def register_bridge(provider: str, api_base: str) -> None:
    """The Anthropic interface of LiteLLM in front of one provider."""
    protocol = f"its Anthropic interface, `{provider}/`"
    common: Any = {"model": f"{provider}/{MODEL}", "api_base": api_base, "api_key": "none", "max_tokens": 4096}

    def words(message: Any) -> str:
        return "".join(block["text"] for block in message["content"] if block["type"] == "text")

    def ask(**more: Any) -> Any:
        return asyncio.run(litellm.anthropic.messages.acreate(**common, **more))

    @check(protocol, "answer", on=WORDS)
    def _() -> None:
        expect(KEY, words(ask(messages=ASKED)))

    @check(protocol, "stream", on=WORDS)
    def _() -> None:
        async def read() -> str:
            stream: Any = await litellm.anthropic.messages.acreate(**common, messages=ASKED, stream=True)
            text = b""
            async for chunk in stream:
                text += chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode() + b"\n"
            return text.decode()

        streamed = asyncio.run(read())
        expect("message_stop", streamed)
        expect("text_delta", streamed)

    @check(protocol, "tool loop")
    def _() -> None:
        task = Task()
        messages: Any = [{"role": "user", "content": task.prompt}]
        while True:
            answer = ask(messages=messages, tools=ANTHROPIC_TOOLS)
            messages.append({"role": "assistant", "content": answer["content"]})
            calls = [block for block in answer["content"] if block["type"] == "tool_use"]
            if not calls:
                break
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": task.run(call["name"], call["input"])}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
        task.finish(words(answer))


register("openai")
register("hosted_vllm")
register_bridge("openai", f"{URL}/v1")
register_bridge("hosted_vllm", f"{URL}/v1")
register_bridge("anthropic", URL)


@check("responses", "answer", on=WORDS)
def _() -> None:
    made: Any = litellm.responses(
        model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", input=QUESTION, max_retries=0
    )
    expect(KEY, [part.text for item in made.output if item.type == "message" for part in item.content])


@check("responses", "tool loop")
def _() -> None:
    task = Task()
    items: Any = [{"role": "user", "content": task.prompt}]
    tools: Any = [
        {"type": "function", "name": name, "description": text, "parameters": schema, "strict": True}
        for name, text, schema in TOOLS
    ]
    while True:
        made: Any = litellm.responses(
            model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", input=items, tools=tools, max_retries=0
        )
        items += [item.model_dump(exclude_none=True) for item in made.output]
        calls = [item for item in made.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            result = task.run(call.name, json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    task.finish([part.text for item in made.output if item.type == "message" for part in item.content])


@check("responses", "structured output")
def _() -> None:
    made: Any = litellm.responses(
        model=f"openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="none",
        input=QUESTION,
        text={"format": {"type": "json_schema", "name": "key", "schema": SCHEMA, "strict": True}},
        max_retries=0,
    )
    (text,) = [part.text for item in made.output if item.type == "message" for part in item.content]
    assert json.loads(text) == {"kind": "pass key", "number": int(KEY)}, text


@check("completions", "answer")
def _() -> None:
    made: Any = litellm.text_completion(
        model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", prompt="The pass key is", max_tokens=8
    )
    assert made.choices[0].text


run()
