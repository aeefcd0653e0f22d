"""LlamaIndex: `OpenAILike`, and its function agent."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from checks import FIRST, KEY, MODEL, QUESTION, URL, WORDS, Task, check, expect, raises, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Key(BaseModel):
    """The pass key."""

    kind: Literal["pass key"]
    number: int


def model(**more: Any) -> OpenAILike:
    """`OpenAILike` as its documentation sets it up for a chat model with tools."""
    settings: dict[str, Any] = {
        "model": MODEL,
        "api_base": f"{URL}/v1",
        "api_key": "none",
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 131_072,
        "max_retries": 0,
    }
    return OpenAILike(**{**settings, **more})


ASKED = ChatMessage(role="user", content=QUESTION)


@check("chat", "answer", on=WORDS)
def _() -> None:
    expect(KEY, model().chat([ASKED]).message.content)


@check("chat", "stream", on=WORDS)
def _() -> None:
    expect(KEY, "".join(piece.delta or "" for piece in model().stream_chat([ASKED])))


@check("chat", "tool loop")
def _() -> None:
    task = Task()

    async def ask() -> str:
        return str(await FunctionAgent(tools=[task.read_file, task.edit_file], llm=model()).run(task.prompt))

    task.finish(asyncio.run(ask()))


@check("chat", "structured output by a tool")
def _() -> None:
    made: Any = model().as_structured_llm(Key).chat([ASKED]).raw
    assert made.number == int(KEY)


@check("chat", "structured output")
def _() -> None:
    own = model(is_function_calling_model=False, should_use_structured_outputs=True)
    made: Any = own.as_structured_llm(Key).chat([ASKED]).raw
    assert made.number == int(KEY)


@check("chat", "second turn")
def _() -> None:
    first = model().chat([ASKED]).message
    expect(KEY, model().chat([ASKED, first, ChatMessage(role="user", content=FIRST)]).message.content)


@check("completions", "answer")
def _() -> None:
    assert model(is_chat_model=False, max_tokens=8).complete("The pass key is").text


@check("chat", "errors")
def _() -> None:
    with raises("NotFoundError", "gpt-4o"):
        model(model="gpt-4o").chat([ASKED])


run()
