"""Outlines: its OpenAI, vLLM and SGLang back ends, which send the fields of those servers."""

from __future__ import annotations

from typing import Any, Literal

import openai
import outlines
from checks import BOTH, KEY, MODEL, QUESTION, URL, WORDS, check, expect, raises, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


class Key(BaseModel):
    kind: Literal["pass key"]
    number: int


def register(name: str, make: Any, patterns: bool) -> None:
    """The checks of one back end; `patterns` says whether it takes choices and regular expressions."""
    protocol = f"chat, `{name}`"

    @check(protocol, "answer", on=WORDS)
    def _() -> None:
        expect(KEY, make()(QUESTION))

    @check(protocol, "stream", on=WORDS)
    def _() -> None:
        expect(KEY, "".join(make().stream(QUESTION)))

    @check(protocol, "structured output", on=BOTH)
    def _() -> None:
        assert Key.model_validate_json(make()(QUESTION, Key)).number == int(KEY)

    if patterns:

        @check(protocol, "choice", on=BOTH)
        def _() -> None:
            assert make()(QUESTION, Literal["yes", "no"]) in ("yes", "no")

        @check(protocol, "regular expression", on=BOTH)
        def _() -> None:
            made = make()(QUESTION, outlines.regex("[0-9]{5}"))
            assert len(made) == 5
            assert made.isdigit()

    @check(protocol, "errors")
    def _() -> None:
        with raises("Exception", "gpt-4o"):
            make("gpt-4o")(QUESTION)


register("from_openai", lambda name=MODEL: outlines.from_openai(client, name), patterns=False)
register("from_vllm", lambda name=MODEL: outlines.from_vllm(client, name), patterns=True)
register("from_sglang", lambda name=MODEL: outlines.from_sglang(client, name), patterns=True)
run()
