"""The official OpenAI package for Python, with a model whose words are its own: what a played model cannot prove."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from checks import FORCED_TOOLS, KEY, MODEL, QUESTION, SMOLLM2, URL, ForcedTask, check, expect, raises, run
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=150)
ASKED: Any = [{"role": "user", "content": QUESTION}]
STORY: Any = [{"role": "user", "content": "Tell me a story about a lantern."}]
PROMPT = "The lantern hangs by the door. The lantern hangs by the"
ON = (SMOLLM2,)


class Key(BaseModel):
    kind: Literal["pass key"]
    number: int


@check("chat", "answer", on=ON)
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASKED)
    expect(KEY, answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"


@check("chat", "the same words in a stream", on=ON)
def _() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=16)
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=16, stream=True, stream_options=options)
    )
    streamed = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(streamed) == whole.choices[0].message.content
    assert len([piece for piece in streamed if piece]) > 5
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 16)


@check("chat", "`max_tokens`", on=ON)
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=7)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7


@check("chat", "log-probabilities", on=ON)
def _() -> None:
    choice = client.chat.completions.create(
        model=MODEL, messages=ASKED, logprobs=True, top_logprobs=3, max_tokens=24
    ).choices[0]
    assert choice.logprobs is not None
    told = choice.logprobs.content or []
    text = b"".join(bytes(token.bytes or []) for token in told).decode().removesuffix("<|im_end|>")
    assert text == choice.message.content, (text, choice.message.content)
    for token in told:
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert token.logprob == values[0], token  # greedy
        assert sum(map(math.exp, values)) <= 1.0001
    assert any(token.logprob < -0.01 for token in told)  # a model is not sure of all its words


@check("chat", "`stop`", on=ON)
def _() -> None:
    choice = client.chat.completions.create(model=MODEL, messages=ASKED, stop=[" key", "never"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("The pass", "stop"), choice


@check("chat", "`seed`, `n`", on=ON)
def _() -> None:
    def ask(seed: int) -> list[str | None]:
        made = client.chat.completions.create(
            model=MODEL, messages=STORY, max_tokens=6, n=2, seed=seed, temperature=1.0, top_p=0.95
        )
        return [choice.message.content for choice in made.choices]

    assert ask(7) == ask(7)
    assert len(set(ask(7) + ask(8))) > 1


@check("chat", "second turn", on=ON)
def _() -> None:
    first = client.chat.completions.create(model=MODEL, messages=ASKED).choices[0].message
    again: Any = [*ASKED, first, {"role": "user", "content": "What is the pass key?"}]
    made = client.chat.completions.create(model=MODEL, messages=again, max_tokens=24)
    expect(KEY, made.choices[0].message.content)
    assert made.usage is not None


@check("chat", "structured output", on=ON)
def _() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Key).choices[0].message.parsed
    assert parsed is not None
    assert parsed.number == int(KEY)


@check("chat", "tool loop, calls forced", on=ON)
def _() -> None:
    task = ForcedTask()
    messages: Any = [{"role": "user", "content": task.prompt}]
    for name, text, schema in FORCED_TOOLS:
        message = (
            client.chat.completions.create(
                model=MODEL,
                messages=messages,
                tools=[{"type": "function", "function": {"name": name, "description": text, "parameters": schema}}],
                tool_choice={"type": "function", "function": {"name": name}} if name == "read_file" else "required",
                parallel_tool_calls=False,
            )
            .choices[0]
            .message
        )
        messages.append(message)
        for call in message.tool_calls or []:
            assert call.type == "function"
            result = task.run(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append({"role": "user", "content": task.ASK})
    task.finish(
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24).choices[0].message.content
    )


@check("completions", "the same words in a stream", on=ON)
def _() -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16).choices[0].text
    expect("door", whole)
    chunks = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole


@check("completions", "log-probabilities of the prompt, by `echo`", on=ON)
def _() -> None:
    choice = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, echo=True, logprobs=2).choices[0]
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert "".join(told.tokens) == choice.text
    expect(PROMPT, choice.text)
    first, second = told.tokens.index(" lantern"), len(told.tokens) - 1 - told.tokens[::-1].index(" lantern")
    assert told.token_logprobs[0] is None
    assert told.token_logprobs[second] > told.token_logprobs[first] + 1  # what was read is expected again
    assert told.text_offset is not None
    assert all(
        choice.text[offset:].startswith(token) for token, offset in zip(told.tokens, told.text_offset, strict=True)
    )


@check("completions", "`stop`", on=ON)
def _() -> None:
    choice = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, stop=["."]).choices[0]
    assert (choice.text, choice.finish_reason) == (" door", "stop"), choice


@check("responses", "the same words as in a chat, and in a stream", on=ON)
def _() -> None:
    chat = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=16).choices[0].message.content
    made = client.responses.create(model=MODEL, input=STORY, max_output_tokens=16)
    assert made.output_text == chat
    assert made.status == "incomplete"
    assert made.usage is not None
    assert made.usage.output_tokens == 16
    with client.responses.stream(model=MODEL, input=STORY, max_output_tokens=16) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == chat
    assert events[-1].type == "response.incomplete"  # at a limit; the helper's final response is for answers that end


@check("responses", "second turn by `previous_response_id`", on=ON)
def _() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION)
    again = client.responses.create(
        model=MODEL, input="What is the pass key?", previous_response_id=first.id, max_output_tokens=24
    )
    expect(KEY, again.output_text)


@check("responses", "structured output", on=ON)
def _() -> None:
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Key).output_parsed
    assert parsed is not None
    assert parsed.number == int(KEY)


@check("responses", "tool loop, calls forced", on=ON)
def _() -> None:
    task = ForcedTask()
    items: Any = [{"role": "user", "content": task.prompt}]
    for name, text, schema in FORCED_TOOLS:
        answer = client.responses.create(
            model=MODEL,
            input=items,
            tools=[{"type": "function", "name": name, "description": text, "parameters": schema, "strict": True}],
            tool_choice={"type": "function", "name": name} if name == "read_file" else "required",
            parallel_tool_calls=False,
        )
        items += answer.output
        for item in answer.output:
            if item.type == "function_call":
                result = task.run(item.name, json.loads(item.arguments))
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    items.append({"role": "user", "content": task.ASK})
    task.finish(client.responses.create(model=MODEL, input=items, max_output_tokens=24).output_text)


@check("embeddings", "none here: a clear error", on=ON)
def _() -> None:
    with raises("NotFoundError", "/v1/embeddings"):
        client.embeddings.create(model=MODEL, input="x")


run()
