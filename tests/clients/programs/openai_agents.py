"""OpenAI's agent framework, by default settings: the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from checks import BOTH, FIRST, KEY, MODEL, QUESTION, SMOLLM2, URL, ForcedTask, Task, check, expect, raises, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)  # the client's connections belong to one loop
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
set_default_openai_client(client, use_for_tracing=False)


class Key(BaseModel):
    kind: Literal["pass key"]
    number: int


def tools_of(task: Task) -> list[Any]:
    """The task's two tools as the framework makes them from functions."""
    return [function_tool(task.read_file), function_tool(task.edit_file)]


def register(protocol: str, model: Any) -> None:
    """The same checks over one protocol."""

    def agent(**more: Any) -> Agent[Any]:
        return Agent(name="helper", instructions="Be brief.", model=model(), **more)

    @check(protocol, "answer", on=BOTH)
    def _() -> None:
        expect(KEY, Runner.run_sync(agent(), QUESTION).final_output)

    @check(protocol, "stream", on=BOTH)
    def _() -> None:
        async def ask() -> Any:
            result = Runner.run_streamed(agent(), QUESTION)
            kinds = [event.type async for event in result.stream_events()]
            assert "raw_response_event" in kinds
            return result.final_output

        expect(KEY, loop.run_until_complete(ask()))

    @check(protocol, "tool loop")
    def _() -> None:
        task = Task()
        task.finish(Runner.run_sync(agent(tools=tools_of(task)), task.prompt).final_output)

    @check(protocol, "tool loop, streamed")
    def _() -> None:
        task = Task()

        async def ask() -> Any:
            result = Runner.run_streamed(agent(tools=tools_of(task)), task.prompt)
            async for _ in result.stream_events():
                pass
            return result.final_output

        task.finish(loop.run_until_complete(ask()))

    @check(protocol, "tool loop, calls forced", on=(SMOLLM2,))
    def _() -> None:
        task = ForcedTask()

        def read_file(path: Literal["notes.txt"]) -> str:
            """Read a file."""
            return task.run("read_file", {"path": path})

        def edit_file(path: Literal["notes.txt"], old_text: Literal["lantern"], new_text: Literal["torch"]) -> str:
            """Replace a text in a file."""
            return task.run("edit_file", {"path": path, "old_text": old_text, "new_text": new_text})

        said: Any = [{"role": "user", "content": task.prompt}]
        for function, choice in ((read_file, "read_file"), (edit_file, "required")):
            forced = agent(
                tools=[function_tool(function)],
                model_settings=ModelSettings(tool_choice=choice, parallel_tool_calls=False),
                tool_use_behavior="stop_on_first_tool",
            )
            said = Runner.run_sync(forced, said).to_input_list()
        said.append({"role": "user", "content": task.ASK})
        task.finish(Runner.run_sync(agent(model_settings=ModelSettings(max_tokens=24)), said).final_output)

    @check(protocol, "structured output", on=BOTH)
    def _() -> None:
        assert Runner.run_sync(agent(output_type=Key), QUESTION).final_output.number == int(KEY)

    @check(protocol, "tool loop with structured output")
    def _() -> None:
        task = Task()
        result = Runner.run_sync(agent(tools=tools_of(task), output_type=Key), task.prompt).final_output
        task.finish(result.number)

    @check(protocol, "handoff")
    def _() -> None:
        result = Runner.run_sync(agent(handoffs=[agent()]), f"Please hand over. {QUESTION}")
        assert "HandoffOutputItem" in [type(item).__name__ for item in result.new_items]

    @check(protocol, "second turn")
    def _() -> None:
        first = Runner.run_sync(agent(), QUESTION)
        again: Any = [*first.to_input_list(), {"role": "user", "content": FIRST}]
        expect(KEY, Runner.run_sync(agent(), again).final_output)

    @check(protocol, "second turn after tools")
    def _() -> None:
        task = Task()
        first = Runner.run_sync(agent(tools=tools_of(task)), task.prompt)
        again: Any = [*first.to_input_list(), {"role": "user", "content": FIRST}]
        expect("Read the file", Runner.run_sync(agent(tools=tools_of(task)), again).final_output)

    @check(protocol, "errors")
    def _() -> None:
        with raises("NotFoundError", "gpt-4o"):
            Runner.run_sync(Agent(name="helper", model=model("gpt-4o")), QUESTION)


register("responses", lambda name=MODEL: name)
register("chat", lambda name=MODEL: OpenAIChatCompletionsModel(model=name, openai_client=client))
run()
