"""Instructor: structured output by calls and by schemas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import instructor
from checks import BOTH, KEY, MODEL, QUESTION, URL, check, raises, run
from openai import OpenAI
from pydantic import BaseModel


class SubmitKey(BaseModel):
    """The pass key."""

    kind: Literal["pass key"]
    number: int


ASKED: Any = [{"role": "user", "content": QUESTION}]


def client(mode: Any) -> Any:
    """A client of this mode."""
    return instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)


for protocol, name in [
    ("chat", "TOOLS"),
    ("chat", "TOOLS_STRICT"),
    ("chat", "JSON_SCHEMA"),
    ("responses", "RESPONSES_TOOLS"),
]:

    @check(protocol, f"structured output, mode `{name}`", on=BOTH)
    def _(name: str = name) -> None:
        made = client(getattr(instructor.Mode, name)).chat.completions.create(
            model=MODEL, messages=ASKED, response_model=SubmitKey, max_retries=1
        )
        assert made.number == int(KEY)


@check("chat", "structured output, streamed", on=BOTH)
def _() -> None:
    made = list(
        client(instructor.Mode.TOOLS).chat.completions.create_partial(
            model=MODEL, messages=ASKED, response_model=SubmitKey
        )
    )
    assert made[-1].number == int(KEY)


@check("chat", "several calls, mode `PARALLEL_TOOLS`")
def _() -> None:
    made = client(instructor.Mode.PARALLEL_TOOLS).chat.completions.create(
        model=MODEL,
        messages=ASKED,
        response_model=Iterable[SubmitKey],
    )
    assert [one.number for one in made] == [int(KEY)]


@check("chat", "errors")
def _() -> None:
    with raises("InstructorRetryException", "gpt-4o"):
        client(instructor.Mode.TOOLS).chat.completions.create(
            model="gpt-4o", messages=ASKED, response_model=SubmitKey, max_retries=1
        )


run()
