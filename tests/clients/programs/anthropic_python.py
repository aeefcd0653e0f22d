"""The official Anthropic package for Python."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, beta_tool
from checks import (
    BOTH,
    FIRST,
    FORCED_TOOLS,
    KEY,
    MODEL,
    QUESTION,
    SCHEMA,
    SMOLLM2,
    TOOLS,
    URL,
    ForcedTask,
    Task,
    check,
    expect,
    raises,
    run,
)

client = Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)
ASKED: Any = [{"role": "user", "content": QUESTION}]
OFFERED: Any = [{"name": name, "description": text, "input_schema": schema} for name, text, schema in TOOLS]
MOST = 4096
STORY: Any = [{"role": "user", "content": "Tell me a story about a lantern."}]


def words(message: Any) -> str:
    """The text of an answer."""
    return "".join(block.text for block in message.content if block.type == "text")


@check("messages", "answer", on=BOTH)
def _() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=MOST, messages=ASKED)
    expect(KEY, words(answer))
    assert answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens > 10
    assert answer.usage.output_tokens > 0


@check("messages", "system blocks with `cache_control`", on=BOTH)
def _() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=MOST,
        system=[{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "Answer."}]}],
        metadata={"user_id": "u"},
    )
    expect(KEY, words(answer))


@check("messages", "stream", on=BOTH)
def _() -> None:
    with client.messages.stream(model=MODEL, max_tokens=MOST, messages=ASKED) as stream:
        expect(KEY, "".join(stream.text_stream))
        assert stream.get_final_message().stop_reason == "end_turn"


@check("messages", "stream of events")
def _() -> None:
    kinds = [event.type for event in client.messages.create(model=MODEL, max_tokens=MOST, messages=ASKED, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


@check("messages", "stop at `max_tokens`", on=BOTH)
def _() -> None:
    assert client.messages.create(model=MODEL, max_tokens=3, messages=ASKED).stop_reason == "max_tokens"


@check("messages", "thinking")
def _() -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=MOST, thinking={"type": "enabled", "budget_tokens": 1024}, messages=ASKED
    )
    assert [block.type for block in answer.content] == ["thinking", "text"], answer.content
    history: Any = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": FIRST}]
    expect(KEY, words(client.messages.create(model=MODEL, max_tokens=MOST, messages=history)))


def loop(make: Any) -> None:
    """A tool loop; `make(messages)` gives the next message."""
    task = Task()
    messages: Any = [{"role": "user", "content": task.prompt}]
    while True:
        answer = make(messages)
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert bool(calls) == (answer.stop_reason == "tool_use"), answer.stop_reason
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": task.run(call.name, call.input)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    task.finish(words(answer))


@check("messages", "tool loop")
def _() -> None:
    loop(lambda messages: client.messages.create(model=MODEL, max_tokens=MOST, messages=messages, tools=OFFERED))


@check("messages", "tool loop, streamed")
def _() -> None:
    def make(messages: Any) -> Any:
        with client.messages.stream(model=MODEL, max_tokens=MOST, messages=messages, tools=OFFERED) as stream:
            return stream.get_final_message()

    loop(make)


@check("messages", "tool loop, calls forced", on=(SMOLLM2,))
def _() -> None:
    task = ForcedTask()
    messages: Any = [{"role": "user", "content": task.prompt}]
    for name, text, schema in FORCED_TOOLS:
        answer = client.messages.create(
            model=MODEL,
            max_tokens=64,
            messages=messages,
            tools=[{"name": name, "description": text, "input_schema": schema}],
            tool_choice={"type": "tool", "name": name}
            if name == "read_file"
            else {"type": "any", "disable_parallel_tool_use": True},
        )
        assert answer.stop_reason == "tool_use", answer
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": task.run(block.name, block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    messages[-1]["content"].append({"type": "text", "text": task.ASK})
    task.finish(words(client.messages.create(model=MODEL, max_tokens=24, messages=messages)))


@check("messages", "the same words in a stream", on=(SMOLLM2,))
def _() -> None:
    whole = client.messages.create(model=MODEL, max_tokens=16, messages=STORY)
    with client.messages.stream(model=MODEL, max_tokens=16, messages=STORY) as stream:
        assert "".join(stream.text_stream) == words(whole)
        usage = stream.get_final_message().usage
    assert (usage.output_tokens, whole.usage.output_tokens) == (16, 16)
    # What the first request has left in the cache is counted apart.
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == whole.usage.input_tokens


@check("messages", "`stop_sequences`", on=(SMOLLM2,))
def _() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=64, messages=ASKED, stop_sequences=[" key", "never"])
    assert (words(answer), answer.stop_reason, answer.stop_sequence) == ("The pass", "stop_sequence", " key"), answer


@check("messages", "tool runner")
def _() -> None:
    task = Task()

    @beta_tool
    def read_file(path: str) -> str:
        """Read a file.

        Args:
            path: the file.
        """
        return task.read_file(path)

    @beta_tool
    def edit_file(path: str, old_text: str, new_text: str) -> str:
        """Replace a text in a file.

        Args:
            path: the file.
            old_text: what is replaced.
            new_text: what replaces it.
        """
        return task.edit_file(path, old_text, new_text)

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=MOST,
        tools=[read_file, edit_file],
        messages=[{"role": "user", "content": task.prompt}],
    )
    task.finish(words(runner.until_done()))


@check("messages", "structured output by a forced call", on=BOTH)
def _() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=MOST,
        messages=ASKED,
        tools=[{"name": "tell_key", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "tell_key"},
    )
    call: Any = next(block for block in answer.content if block.type == "tool_use")
    assert call.input == {"kind": "pass key", "number": int(KEY)}, call.input


@check("messages", "structured output by `output_config`", on=BOTH)
def _() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=MOST,
        messages=ASKED,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    expect(f'"number": {KEY}', words(answer))


@check("messages", "second turn")
def _() -> None:
    first = client.messages.create(model=MODEL, max_tokens=MOST, messages=ASKED)
    history: Any = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": FIRST}]
    expect(KEY, words(client.messages.create(model=MODEL, max_tokens=MOST, messages=history)))


@check("messages", "count tokens", on=BOTH)
def _() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED, tools=OFFERED).input_tokens
    assert (
        counted == client.messages.create(model=MODEL, max_tokens=8, messages=ASKED, tools=OFFERED).usage.input_tokens
    ), counted


@check("messages", "models")
def _() -> None:
    assert MODEL in [model.id for model in client.models.list()]


@check("messages", "errors")
def _() -> None:
    with raises("NotFoundError", "not_found_error"):
        client.messages.create(model="claude-none", max_tokens=MOST, messages=ASKED)
    with raises("BadRequestError", "invalid_request_error", "max_tokens"):
        client.messages.create(model=MODEL, max_tokens=-1, messages=ASKED)


run()
