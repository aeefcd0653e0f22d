"""Pydantic AI with its three kinds of models."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from checks import FIRST, KEY, MODEL, QUESTION, URL, WORDS, Task, check, expect, raises, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Key(BaseModel):
    """The pass key."""

    kind: Literal["pass key"]
    number: int


openai_provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
anthropic_provider = AnthropicProvider(base_url=URL, api_key="none")


def register(protocol: str, model: Any, native: bool) -> None:
    """The same checks over one protocol; `native` models have structured outputs of their own."""

    def agent(name: str = MODEL, **more: Any) -> Agent[Any, Any]:
        return Agent(model(name), retries=1, **more)

    @check(protocol, "answer", on=WORDS)
    def _() -> None:
        expect(KEY, agent().run_sync(QUESTION).output)

    @check(protocol, "stream", on=WORDS)
    def _() -> None:
        async def ask() -> str:
            async with agent().run_stream(QUESTION) as result:
                return "".join([piece async for piece in result.stream_text(delta=True)])

        expect(KEY, asyncio.run(ask()))

    @check(protocol, "tool loop")
    def _() -> None:
        task = Task()
        task.finish(agent(tools=[task.read_file, task.edit_file]).run_sync(task.prompt).output)

    @check(protocol, "tool loop, streamed")
    def _() -> None:
        task = Task()

        async def ask() -> str:
            async with agent(tools=[task.read_file, task.edit_file]).run_stream(task.prompt) as result:
                return "".join([piece async for piece in result.stream_text(delta=True)])

        task.finish(asyncio.run(ask()))

    @check(protocol, "structured output by a tool")
    def _() -> None:
        assert agent(output_type=ToolOutput(Key)).run_sync(QUESTION).output.number == int(KEY)

    if native:

        @check(protocol, "structured output")
        def _() -> None:
            assert agent(output_type=NativeOutput(Key)).run_sync(QUESTION).output.number == int(KEY)

        @check(protocol, "tool loop with structured output")
        def _() -> None:
            task = Task()
            made = agent(tools=[task.read_file, task.edit_file], output_type=NativeOutput(Key)).run_sync(task.prompt)
            task.finish(made.output.number)

    @check(protocol, "tool loop with a tool for the output")
    def _() -> None:
        task = Task()
        made = agent(tools=[task.read_file, task.edit_file], output_type=ToolOutput(Key)).run_sync(task.prompt)
        task.finish(made.output.number)

    @check(protocol, "second turn")
    def _() -> None:
        first = agent().run_sync(QUESTION)
        expect(KEY, agent().run_sync(FIRST, message_history=first.all_messages()).output)

    @check(protocol, "errors")
    def _() -> None:
        with raises("ModelHTTPError", "404"):
            agent("gpt-4o").run_sync(QUESTION)


register("chat", lambda name: OpenAIChatModel(name, provider=openai_provider), native=True)
register("responses", lambda name: OpenAIResponsesModel(name, provider=openai_provider), native=True)
register("messages", lambda name: AnthropicModel(name, provider=anthropic_provider), native=False)
run()
