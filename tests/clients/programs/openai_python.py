"""The official OpenAI package for Python."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from checks import FIRST, KEY, MODEL, QUESTION, TOOLS, URL, Task, check, expect, raises, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASKED: Any = [{"role": "user", "content": QUESTION}]
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": schema, "strict": True}}
    for name, text, schema in TOOLS
]
TOOLS_OF_RESPONSES: Any = [
    {"type": "function", "name": name, "description": text, "parameters": schema, "strict": True}
    for name, text, schema in TOOLS
]


class Key(BaseModel):
    kind: Literal["pass key"]
    number: int


class ReadFile(BaseModel):
    """Read a file."""

    path: str


@check("chat", "answer")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASKED)
    expect(KEY, answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check("chat", "stream")
def _() -> None:
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=ASKED, stream=True, stream_options={"include_usage": True})
    )
    expect(KEY, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    assert chunks[-1].usage is not None


@check("chat", "stream helper")
def _() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED) as stream:
        kinds = {event.type for event in stream}
        expect(KEY, stream.get_final_completion().choices[0].message.content)
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds


@check("chat", "tool loop")
def _() -> None:
    task = Task()
    messages: Any = [{"role": "user", "content": task.prompt}]
    while True:
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            result = task.run(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    task.finish(message.content)


@check("chat", "tool loop, streamed")
def _() -> None:
    task = Task()
    messages: Any = [{"role": "user", "content": task.prompt}]
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=CHAT_TOOLS) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = task.run(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    task.finish(message.content)


@check("chat", "forced call, parsed")
def _() -> None:
    message = (
        client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": Task().prompt}],
            tools=[openai.pydantic_function_tool(ReadFile)],
            tool_choice="required",
        )
        .choices[0]
        .message
    )
    assert message.tool_calls
    assert isinstance(message.tool_calls[0].function.parsed_arguments, ReadFile)


@check("chat", "structured output")
def _() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Key).choices[0].message.parsed
    assert parsed is not None
    assert parsed.number == int(KEY)


@check("chat", "second turn")
def _() -> None:
    first = client.chat.completions.create(model=MODEL, messages=ASKED).choices[0].message
    again: Any = [*ASKED, first, {"role": "user", "content": FIRST}]
    expect(KEY, client.chat.completions.create(model=MODEL, messages=again).choices[0].message.content)


@check("chat", "second turn after `parse`")
def _() -> None:
    first = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Key).choices[0].message
    again: Any = [*ASKED, first, {"role": "user", "content": FIRST}]
    expect(KEY, client.chat.completions.create(model=MODEL, messages=again).choices[0].message.content)


@check("chat", "`user`, `metadata`, `store`, `safety_identifier`, `prompt_cache_key`")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        user="u",
        metadata={"a": "b"},
        store=True,
        safety_identifier="s",
        prompt_cache_key="k",
    )
    expect(KEY, answer.choices[0].message.content)


@check("chat", "errors")
def _() -> None:
    with raises("NotFoundError", "gpt-4o"):
        client.chat.completions.create(model="gpt-4o", messages=ASKED)
    with raises("BadRequestError", "temperature"):
        client.chat.completions.create(model=MODEL, messages=ASKED, temperature=9)
    with raises("BadRequestError"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a b c " * 800_000}])


@check("completions", "answer")
def _() -> None:
    assert client.completions.create(model=MODEL, prompt="The pass key is", max_tokens=8).choices[0].text


@check("completions", "stream")
def _() -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="The pass key is", max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@check("models", "list")
def _() -> None:
    assert MODEL in [model.id for model in client.models.list()]


@check("responses", "answer")
def _() -> None:
    expect(KEY, client.responses.create(model=MODEL, input=QUESTION).output_text)


@check("responses", "stream helper")
def _() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION) as stream:
        kinds = [event.type for event in stream]
        expect(KEY, stream.get_final_response().output_text)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


@check("responses", "tool loop")
def _() -> None:
    task = Task()
    items: Any = [{"role": "user", "content": task.prompt}]
    while True:
        answer = client.responses.create(model=MODEL, input=items, tools=TOOLS_OF_RESPONSES)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            result = task.run(call.name, json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    task.finish(answer.output_text)


@check("responses", "tool loop, streamed, by `previous_response_id`")
def _() -> None:
    task = Task()
    items: Any = [{"role": "user", "content": task.prompt}]
    previous: Any = openai.omit
    while True:
        with client.responses.stream(
            model=MODEL, input=items, tools=TOOLS_OF_RESPONSES, previous_response_id=previous
        ) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_response()
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        previous = answer.id
        items = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": task.run(call.name, json.loads(call.arguments)),
            }
            for call in calls
        ]
    task.finish(answer.output_text)


@check("responses", "custom tool")
def _() -> None:
    tool: Any = {"type": "custom", "name": "apply_patch", "description": "Edit files by a patch."}
    shell: Any = {
        "type": "function",
        "name": "shell",
        "strict": False,
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    }
    task = Task()
    items: Any = [{"role": "user", "content": task.prompt}]
    read = client.responses.create(model=MODEL, input=items, tools=[shell, tool])
    call: Any = next(item for item in read.output if item.type == "function_call")
    items += read.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": task.path.read_text()})
    edit = client.responses.create(model=MODEL, input=items, tools=[shell, tool])
    patch: Any = next(item for item in edit.output if item.type == "custom_tool_call")
    expect("*** Begin Patch", patch.input)
    items += edit.output
    items.append({"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done."})
    expect(task.key, client.responses.create(model=MODEL, input=items, tools=[shell, tool]).output_text)


@check("responses", "structured output")
def _() -> None:
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Key).output_parsed
    assert parsed is not None
    assert parsed.number == int(KEY)


@check("responses", "second turn")
def _() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION)
    items: Any = [*ASKED, *first.output, {"role": "user", "content": FIRST}]
    expect(KEY, client.responses.create(model=MODEL, input=items).output_text)
    dumped: Any = [*ASKED, *[item.model_dump() for item in first.output], {"role": "user", "content": FIRST}]
    expect(KEY, client.responses.create(model=MODEL, input=dumped).output_text)


@check("responses", "second turn by `previous_response_id`")
def _() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION)
    expect(KEY, client.responses.create(model=MODEL, input=FIRST, previous_response_id=first.id).output_text)


@check("responses", "retrieve, input items, delete")
def _() -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, store=True)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert len(list(client.responses.input_items.list(made.id))) == 1
    client.responses.delete(made.id)
    with raises("NotFoundError"):
        client.responses.retrieve(made.id)


@check("responses", "background")
def _() -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, background=True)
    assert made.status in ("queued", "in_progress", "completed")
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    expect(KEY, made.output_text)


@check("responses", "input tokens")
def _() -> None:
    assert client.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens > 10


@check("responses", "async")
def _() -> None:
    async def ask() -> str:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as own:
            return (await own.responses.create(model=MODEL, input=QUESTION)).output_text

    expect(KEY, asyncio.run(ask()))


@check("responses", "errors")
def _() -> None:
    with raises("NotFoundError"):
        client.responses.create(model="gpt-4o", input=QUESTION)
    with raises("NotFoundError"):
        client.responses.retrieve("resp_none")
    with raises("BadRequestError", "temperature"):
        client.responses.create(model=MODEL, input=QUESTION, temperature=9)


run()
