"""Guidance: its OpenAI model, and its vLLM model, which sends grammars of llguidance."""

from __future__ import annotations

from typing import Any

import guidance
from checks import BOTH, FIRST, KEY, MODEL, QUESTION, SCHEMA, URL, WORDS, Task, check, expect, raises, run
from guidance import assistant, gen, models, user
from guidance.models.experimental import VLLMModel


def register(name: str, kind: Any, patterns: bool) -> None:
    """The checks of one model; `patterns` says whether it takes regular expressions."""
    protocol = f"chat, `{name}`"

    def model(model_name: str = MODEL) -> Any:
        return kind(model_name, base_url=f"{URL}/v1", api_key="none", echo=False)

    @check(protocol, "answer", on=WORDS)
    def _() -> None:
        state = model()
        with user():
            state += QUESTION
        with assistant():
            state += gen("answer")
        expect(KEY, state["answer"])

    @check(protocol, "structured output", on=BOTH)
    def _() -> None:
        state = model()
        with user():
            state += QUESTION
        with assistant():
            state += guidance.json("answer", schema=SCHEMA)
        expect(KEY, state["answer"])

    if patterns:

        @check(protocol, "regular expression", on=BOTH)
        def _() -> None:
            state = model()
            with user():
                state += QUESTION
            with assistant():
                state += gen("answer", regex="[0-9]{5}")
            assert len(state["answer"]) == 5

    @check(protocol, "tool loop")
    def _() -> None:
        task = Task()
        state = model()
        with user():
            state += task.prompt
        for _ in range(3):
            with assistant():
                state += gen(tools=[task.read_file, task.edit_file], tool_choice="auto")
        task.finish(str(state).rpartition("The file is changed.")[2])
        assert task.calls == ["read_file", "edit_file"]

    @check(protocol, "second turn")
    def _() -> None:
        state = model()
        with user():
            state += QUESTION
        with assistant():
            state += gen("answer")
        with user():
            state += FIRST
        with assistant():
            state += gen("again")
        expect(KEY, state["again"])

    @check(protocol, "errors")
    def _() -> None:
        state = model("gpt-4o")
        with raises("Exception", "gpt-4o"):
            with user():
                state += QUESTION
            with assistant():
                state += gen("answer")


register("models.OpenAI", models.OpenAI, patterns=False)
register("VLLMModel", VLLMModel, patterns=True)
run()
