"""LangChain: `ChatOpenAI` over both of OpenAI's protocols, and `ChatAnthropic`."""

from __future__ import annotations

from typing import Any, Literal

from checks import FIRST, KEY, MODEL, QUESTION, URL, WORDS, Task, check, expect, raises, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Key(BaseModel):
    """The pass key."""

    kind: Literal["pass key"]
    number: int


def words(message: AIMessage) -> str:
    """The text of an answer."""
    text = message.text
    return text if isinstance(text, str) else text()


def register(protocol: str, model: Any, methods: list[str]) -> None:
    """The same checks over one protocol; `methods` are those of `with_structured_output`."""

    @check(protocol, "answer", on=WORDS)
    def _() -> None:
        answer = model().invoke(QUESTION)
        expect(KEY, words(answer))
        assert answer.usage_metadata["total_tokens"] > 10

    @check(protocol, "stream", on=WORDS)
    def _() -> None:
        whole: Any = None
        for chunk in model().stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        expect(KEY, words(whole))
        assert whole.usage_metadata["total_tokens"] > 10

    def loop(make: Any) -> None:
        task = Task()
        bound = model().bind_tools([tool(task.read_file), tool(task.edit_file)])
        messages: list[Any] = [HumanMessage(task.prompt)]
        while True:
            answer = make(bound, messages)
            messages.append(answer)
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                messages.append(ToolMessage(task.run(call["name"], call["args"]), tool_call_id=call["id"]))
        task.finish(words(answer))

    @check(protocol, "tool loop")
    def _() -> None:
        loop(lambda bound, messages: bound.invoke(messages))

    @check(protocol, "tool loop, streamed")
    def _() -> None:
        def make(bound: Any, messages: list[Any]) -> Any:
            whole: Any = None
            for chunk in bound.stream(messages):
                whole = chunk if whole is None else whole + chunk
            return whole

        loop(make)

    for method in methods:

        @check(protocol, f"structured output, `{method}`")
        def _(method: str = method) -> None:
            made = model().with_structured_output(Key, method=method).invoke(QUESTION)
            assert made.number == int(KEY)

    @check(protocol, "second turn")
    def _() -> None:
        first = model().invoke(QUESTION)
        expect(KEY, words(model().invoke([HumanMessage(QUESTION), first, HumanMessage(FIRST)])))

    @check(protocol, "errors")
    def _() -> None:
        with raises("NotFoundError", "gpt-4o"):
            model(model="gpt-4o").invoke(QUESTION)


def chat(**more: Any) -> ChatOpenAI:
    """`ChatOpenAI` by default settings."""
    return ChatOpenAI(
        **{"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_retries": 0, "stream_usage": True, **more}
    )


def messages_model(**more: Any) -> ChatAnthropic:
    """`ChatAnthropic` by default settings."""
    return ChatAnthropic(**{"base_url": URL, "api_key": "none", "model": MODEL, "max_retries": 0, **more})


register("chat", chat, ["json_schema", "function_calling"])
register("responses", lambda **more: chat(use_responses_api=True, **more), ["json_schema", "function_calling"])
register("messages", messages_model, ["function_calling", "json_schema"])


@check("completions", "answer")
def _() -> None:
    model: Any = OpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, max_tokens=8)
    assert model.invoke("The pass key is")


run()
