"""Reasoning, words and calls are told apart the same way however the text is cut into pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from longreach.errors import TokenizerError
from longreach.text.answer_format import AnswerFormat, Part, shared_marks

QWEN = AnswerFormat(shared_marks("<|im_start|> <think> <tool_call>"))
XML = AnswerFormat(shared_marks("<tool_call> <function=name>"))
PROMPT = "<|im_start|>user\n<think>no</think><|im_end|>\n<|im_start|>assistant\n"
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def read(
    form: AnswerFormat, text: str, cuts: list[int] | None = None, prompt: str = PROMPT
) -> list[tuple[str, object]]:
    """The parts, those of one kind that touch joined."""
    reader = form.reader(prompt, [TOOL])
    ends = [*sorted({cut % (len(text) + 1) for cut in cuts or []}), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    parts: list[Part] = [part for piece in pieces for part in reader.push(piece)] + reader.flush()
    joined: list[tuple[str, object]] = []
    name = arguments = ""
    for part in parts:
        if part.call is not None:
            name, arguments = part.call.name, ""
        elif part.kind == "arguments":
            arguments += part.text
        elif part.kind == "call_end":
            joined.append(("call", (name, json.loads(arguments))))
        elif joined and joined[-1][0] == part.kind:
            joined[-1] = part.kind, str(joined[-1][1]) + part.text
        else:
            joined.append((part.kind, part.text))
    return joined


EXAMPLES = {
    "just < words": [("content", "just < words")],
    "<think>\nhm</think>\n\nyes": [("reasoning", "hm"), ("content", "yes")],
    "<think>hm": [("reasoning", "hm")],
    'I add.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>': [
        ("content", "I add."),
        ("call", ("add", {"a": 1})),
    ],
    '<tool_call>{"name": "add"}</tool_call> <tool_call>{"name": "x", "arguments": {}}</tool_call>': [
        ("call", ("add", {})),
        ("call", ("x", {})),
    ],
}


@pytest.mark.parametrize("text", EXAMPLES)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_parts_do_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    assert read(QWEN, text, cuts) == EXAMPLES[text]


def test_reasoning_may_have_been_opened_by_the_prompt() -> None:
    assert read(QWEN, "hm</think>yes", prompt=PROMPT + "<think>\n") == [("reasoning", "hm"), ("content", "yes")]
    assert read(QWEN, "yes", prompt=PROMPT + "<think>\n\n</think>\n\n") == [("content", "yes")]


def test_arguments_written_without_types_get_the_functions() -> None:
    text = "<tool_call>\n<function=add>\n<parameter=a>\n41\n</parameter>\n</function>\n</tool_call>"
    assert read(XML, text) == [("call", ("add", {"a": 41}))]


@pytest.mark.parametrize(
    "text", ["<tool_call>{oops}</tool_call>", "<tool_call>7</tool_call>", '<tool_call>{"name": "a']
)
def test_a_call_that_is_none_is_words(text: str) -> None:
    [(kind, words)] = read(QWEN, text)
    assert kind == "content"
    assert str(words).strip() in text


def test_a_model_without_marks_answers_in_words() -> None:
    plain = AnswerFormat(None)
    assert plain.is_plain
    assert not plain.has_tool_calls
    assert read(plain, "<think>x</think>") == [("content", "<think>x</think>")]
    assert shared_marks("{{ messages }}") is None
    assert shared_marks("<think>") is not None
    assert not AnswerFormat(shared_marks("<think>")).has_tool_calls


def test_a_tokenizers_own_response_template_goes_first(tmp_path: Path) -> None:
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"thinking": {"open": "[[", "close": "]]"}, "content": {}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": template}))
    form = AnswerFormat.load(str(tmp_path), ["<think> <tool_call>"])
    assert read(form, "[[hm]]<think>yes") == [("reasoning", "hm"), ("content", "<think>yes")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": {"fields": 7}}))
    with pytest.raises(TokenizerError, match="response_template"):
        AnswerFormat.load(str(tmp_path), [])
