"""Reasoning, words and calls are told apart the same way however the text is cut into pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from longreach.errors import TokenizerError
from longreach.text.answer_format import AnswerFormat
from longreach.text.calls.formats import FORMATS, HARMONY, MARKED, CallFormat, format_named

from tests.server.text.calls import TOOLS, read

QWEN = AnswerFormat.seen_in("<|im_start|> <think> <tool_call>")
PROMPT = "<|im_start|>user\n<think>no</think><|im_end|>\n<|im_start|>assistant\n"
CUTS = st.lists(st.integers(0, 400), max_size=8)
each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
CALL = ("call", "look", '{"city": "Bonn"}')

EXAMPLES: dict[str, list[tuple[str, ...]]] = {
    "just < words": [("content", "just < words")],
    "two\n\nlines \n": [("content", "two\n\nlines \n")],
    "<think>\nhm</think>\n\nyes": [("reasoning", "hm"), ("content", "yes")],
    "<think>hm": [("reasoning", "hm")],
    "Write <think> first": [("content", "Write <think> first")],
    '<tool_call>{"name": "add"}</tool_call>\n<think>so</think>yes': [
        ("call", "add", "{}"),
        ("reasoning", "so"),
        ("content", "yes"),
    ],
    'I add.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n': [
        ("content", "I add."),
        ("call", "add", '{"a": 1}'),
    ],
    'I add.\n<tool_call>{"name": "add"}</tool_call>\nand': [
        ("content", "I add."),
        ("call", "add", "{}"),
        ("content", "\n\nand"),
    ],
    '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call> <tool_call>{"name": "look"}</tool_call>': [
        ("call", "add", '{"a": 1}'),
        ("call", "look", "{}"),
    ],
}


def whole_and_written(form: AnswerFormat, text: str, cuts: list[int], prompt: str = PROMPT) -> list[tuple[str, ...]]:
    """The parts of an answer, which are the same whether calls are told whole or as they are written."""
    whole, written = (read(form.reader(prompt, TOOLS, mode), text, cuts) for mode in (True, False))
    assert whole == written
    return whole


@pytest.mark.parametrize("text", EXAMPLES)
@given(cuts=CUTS)
def test_parts_do_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    assert whole_and_written(QWEN, text, cuts) == EXAMPLES[text]


COHERE = AnswerFormat.seen_in("<|START_THINKING|> <|START_ACTION|>")
HUNYUAN = AnswerFormat.seen_in("<think> <answer> <tool_calls>")
ACTION, LISTED = format_named("cohere").example, format_named("hunyuan").example
FRAMED: list[tuple[AnswerFormat, str, list[tuple[str, ...]]]] = [
    (COHERE, "<|START_RESPONSE|>Yes. <|END_RESPONSE|>", [("content", "Yes.")]),
    (
        COHERE,
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>",
        [("reasoning", "hm"), ("content", "Yes")],
    ),
    (COHERE, f"<|START_THINKING|>hm<|END_THINKING|>{ACTION}", [("reasoning", "hm"), CALL]),
    (COHERE, "So <|START_RESPONSE|> is it", [("content", "So <|START_RESPONSE|> is it")]),
    (HUNYUAN, "<think>\nhm\n</think>\n<answer>\nYes\n</answer>\n", [("reasoning", "hm\n"), ("content", "Yes")]),
    (HUNYUAN, f"<think>\n\n</think>\n<answer>{LISTED}\n</answer>", [CALL]),
    (HUNYUAN, f"<answer>I look.\n{LISTED}</answer>", [("content", "I look."), CALL]),
    (HUNYUAN, "<answer>a</answer> b</answer>", [("content", "a</answer> b")]),
    (HUNYUAN, "<answer>Write </answer", [("content", "Write </answer")]),
    (HUNYUAN, "a <answer>b</answer>", [("content", "a <answer>b</answer>")]),
    (QWEN, "<answer>b</answer>", [("content", "<answer>b</answer>")]),
]


@pytest.mark.parametrize("case", range(len(FRAMED)))
def test_marks_around_words_are_no_part_of_them(case: int) -> None:
    form, text, parts = FRAMED[case]
    for cuts in ([], [*range(len(text))], [*range(0, len(text), 3)]):
        assert whole_and_written(form, text, cuts) == parts
        assert CALL in parts or read(form.reader(PROMPT), text, cuts) == parts


def test_reasoning_may_have_been_opened_by_the_prompt() -> None:
    form, opened = QWEN, [("reasoning", "hm"), ("content", "yes")]
    assert whole_and_written(form, "hm</think>yes", [], PROMPT + "<think>\n") == opened
    assert whole_and_written(form, "yes", [], PROMPT + "<think>\n\n</think>\n\n") == opened[1:]


def test_an_answer_that_goes_on_with_a_message_keeps_its_first_blank() -> None:
    for form in (QWEN, AnswerFormat(None, HARMONY), AnswerFormat(None, format_named("mistral"))):
        assert read(form.reader(PROMPT + "Some", TOOLS, begun="Some"), " and more") == [("content", " and more")]
    for begun, kind in (("<think>\nLet me", "reasoning"), ("<think>Let</think> me", "content")):
        assert read(QWEN.reader(PROMPT + begun, begun=begun), "see")[0] == (kind, "see")


def test_special_tokens_are_text_only_where_marks_are_looked_for() -> None:
    for form, without in ((QWEN, True), (AnswerFormat(None, HARMONY), True), (AnswerFormat(None, MARKED[0]), False)):
        assert form.reads_marks(True)
        assert form.reads_marks(False) == without
    assert not AnswerFormat().reads_marks(True)


@each_format
@given(cuts=CUTS)
def test_each_format_is_read(form: CallFormat, cuts: list[int]) -> None:
    answer = AnswerFormat(None, form)
    assert whole_and_written(answer, form.example, cuts) == [CALL]
    if not form.unmarked:
        assert whole_and_written(answer, f"So:\n{form.example}\n{form.example}", cuts) == [
            ("content", "So:"),
            CALL,
            CALL,
        ]


def damaged(form: CallFormat) -> list[str]:
    """Texts that look like calls and are none, of which a call's beginning is never read."""
    call = form.example
    other = call.replace("look", "peek")  # it is not offered
    no_name = call.replace("look", "")
    mark = form.opens[0]
    return [other, no_name, mark, f"{mark} {mark}", f"{mark}{{'name': 'look'}}", call.replace("look", "loo k")]


@each_format
@given(data=st.data())
def test_what_cannot_be_read_is_words_and_good_calls_are_still_read(form: CallFormat, data: st.DataObject) -> None:
    good = form.example if not form.unmarked else form.opens[0] + form.example
    kinds = st.sampled_from([" words\n", "{}", "end", good, *damaged(form)])
    texts = data.draw(st.lists(kinds, max_size=6))
    expected: list[tuple[str, ...]] = []
    for text in ["Hm.", *texts]:
        if text == good:
            expected.append(CALL)
        elif expected and expected[-1][0] == "content":
            expected[-1] = ("content", expected[-1][1] + text)
        else:
            expected.append(("content", text))
    found = whole_and_written(AnswerFormat(None, form), "".join(["Hm.", *texts]), data.draw(CUTS))
    # Blank space around calls is no part of an answer.
    assert [(part[0], "".join(part[1:]).split()) for part in found] == [
        (part[0], "".join(part[1:]).split()) for part in expected if part[0] == "call" or part[1].strip()
    ]
    if good not in texts:
        assert found == expected


RAW = (
    '{"big": 18446744073709551616,  "f": 1.10, "e": 1E5, "a": 1, "a": 2, '
    '"s": " \\u00e9 </tool_call> [/x] ", "o": {"x": []}}'
)
JSON_FORMS = [form for form in FORMATS if (not form.nests and form.name != "olmo3") or form is HARMONY]


@pytest.mark.parametrize("form", JSON_FORMS, ids=lambda form: form.name)
@given(cuts=CUTS)
def test_arguments_are_told_as_they_are_written(form: CallFormat, cuts: list[int]) -> None:
    text = form.example.replace('{"city": "Bonn"}', RAW)
    assert whole_and_written(AnswerFormat(None, form), text, cuts) == [("call", "look", RAW)]


NOT_ARGUMENTS = [
    *('"Oslo"', "[1, 2]", "null", "7", "{", '{"x": NaN}', '{"x": 01}', '{"x": 1e999}', "{'x': 1}", '{"x": 1,}'),
    *('{"x": "\\ud83d"}', '{"x": "\\udc00"}', '{"x": "a\nb"}', '{"x": "\\q"}', '{"x": ' * 64 + "{}" + "}" * 64),
]


@pytest.mark.parametrize("form", JSON_FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("arguments", NOT_ARGUMENTS)
def test_what_could_not_be_sent_back_is_no_call(form: CallFormat, arguments: str) -> None:
    text = "Well " + form.example.replace('{"city": "Bonn"}', arguments)
    answer = AnswerFormat(None, form)
    assert all(read(answer.reader(PROMPT, TOOLS, True), text, cuts) == [("content", text)] for cuts in ([], range(400)))
    for part in read(answer.reader(PROMPT, TOOLS, False), text):
        assert part[0] in ("content", "open")
        if part[0] == "open":
            with pytest.raises(ValueError, match=r"."):
                json.loads(part[2])


@each_format
def test_a_call_that_is_cut_is_not_told_as_one(form: CallFormat) -> None:
    answer, text = AnswerFormat(None, form), form.example
    done = "<｜tool▁call▁end｜>" if form.name == "deepseek" else text  # what stands behind it closes a list of calls
    for length in range(1, len(text)):
        cut = text[:length]
        whole = read(answer.reader(PROMPT, TOOLS, True), cut, cut=True)
        if done in cut:
            assert whole[0] == CALL
            continue
        assert whole == [("content", cut)]
        for kind, *rest in read(answer.reader(PROMPT, TOOLS, False), cut, range(length), cut=True):
            assert kind in ("content", "open")
            assert kind != "open" or (CALL[2].startswith(rest[1]) and rest[1] != CALL[2])


def test_a_stop_string_may_stand_for_the_mark_that_closes() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}\n'
    assert read(QWEN.reader(PROMPT, TOOLS, True), text) == [("call", "add", "{}")]
    assert read(QWEN.reader(PROMPT, TOOLS, True), text, cut=True) == [("content", text)]


def test_parameters_and_arguments_in_a_string_are_arguments() -> None:
    for written in ('"parameters": {"a": "}"}', r'"arguments": "{\"a\": \"}\"}"'):
        text = f'<tool_call>{{"id": 1, "name": "add", {written}, "why": [null]}}</tool_call>'
        assert whole_and_written(QWEN, text, [30]) == [("call", "add", '{"a": "}"}')]
    both = '<tool_call>{"name": "add", "parameters": {}, "arguments": {}}</tool_call>'
    assert read(QWEN.reader(PROMPT, TOOLS, True), both) == [("content", both)]


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "add"}</tool_call> '
    assert read(QWEN.reader(PROMPT), text, range(40)) == [("content", text)]


def test_a_model_without_marks_answers_in_words() -> None:
    plain = AnswerFormat.seen_in("{{ messages }}")
    assert plain.is_plain
    assert not plain.has_tool_calls
    assert read(plain.reader(PROMPT, TOOLS), " <think>x</think>\n") == [("content", " <think>x</think>\n")]
    assert not AnswerFormat.seen_in("<think>").has_tool_calls


SEEN = {
    "{{ '<tool_call>' }}{{ tool_call | tojson }}": "hermes",
    "<tool_call>\\n<function=' + name": "qwen3_coder",
    "<seed:tool_call>\\n<function=": "seed_oss",
    "<tool_call>{function-name}\n<arg_key>": "glm",
    "[TOOL_CALLS] [": "mistral",
    "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'": "deepseek",
    "<|start_header_id|> '\"parameters\": '": "llama3_json",
    "<|start_header_id|> <tool_call> '\"parameters\": '": "hermes",
    "<|channel|>analysis<|message|>": "harmony",
    "toolcall_begin_token = '<minimax:tool_call>'": "minimax_m2",
    "<tool_calls> <tool_call>{{ name }}<tool_sep> <arg_key>": "hy_v3",
    "<tool_calls> <tool_call>{{ name }}\\n```json": "hunyuan",
    "<|start_of_role|> respond with <|tool_call|>": "granite",
    "<|start_of_role|> <tool_call>": "hermes",
    "'<|tool|>' + message['tools'] + '<|/tool|>'": "phi4_mini",
    "<function_calls>": "olmo3",
    "<TOOLCALL>[": "toolcall",
    "<|START_ACTION|>[": "cohere",
    "'<|tools_prefix|>['": "apertus",
}


@pytest.mark.parametrize("template", SEEN)
def test_the_format_is_seen_in_the_template(template: str) -> None:
    assert AnswerFormat.seen_in(template).calls is format_named(SEEN[template])
    assert {form.name for form in FORMATS} == {*SEEN.values()}
    assert all(form.evidence for form in (*MARKED, HARMONY))


def test_other_marks_of_reasoning() -> None:
    for opens, closes in (
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("Here is my thought process:", "Here is my response:"),
    ):
        form = AnswerFormat.seen_in(f"... {opens} ...")
        found = [("reasoning", "hm "), ("content", "yes")]
        assert all(read(form.reader(""), f"{opens}\nhm {closes} yes", cuts) == found for cuts in ([], range(90)))


def declared(tmp_path: Path, **fields: dict[str, object]) -> AnswerFormat:
    """The format of a tokenizer with a `response_template` of these fields, and of words."""
    template = {"start_anchor": "<|im_start|>assistant\n", "fields": {**fields, "content": {}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": template}))
    return AnswerFormat.load(str(tmp_path), ["<think> <tool_call>"])


def test_a_tokenizers_own_response_template_goes_before_the_chat_template(tmp_path: Path) -> None:
    form = declared(tmp_path, thinking={"open": "[[", "close": "]]"})
    assert not form.has_tool_calls
    assert whole_and_written(form, "[[hm]]<think>yes", [3]) == [("reasoning", "hm"), ("content", "<think>yes")]
    assert whole_and_written(form, "hm]]yes", [], PROMPT + "[[") == [("reasoning", "hm"), ("content", "yes")]
    named = AnswerFormat.load(str(tmp_path), ["<think> <tool_call>"], "mistral")
    assert named.calls is format_named("mistral")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": {"fields": 7}}))
    with pytest.raises(TokenizerError, match="response_template"):
        AnswerFormat.load(str(tmp_path), [])


FUNCTION = {"type": "function", "function": "{content}"}
OWN_CALLS: dict[str, dict[str, object]] = {
    f'((CALL{{"name": "look", "arguments": {RAW}}}))': {
        "open_pattern": r"\s*\(\(CALL",
        "close": "))",
        "repeats": True,
        "content": "json",
        "transform": FUNCTION,
    },
    f"((look:{RAW}))": {
        "open_pattern": r"\(\((?P<name>\w+):",
        "close_pattern": r"\)\)",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    "((look:<days=18446744073709551616><city= 7 >))": {
        "open_pattern": r"\(\((?P<name>\w+):",
        "close": "))",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<(?P<key>\w+)=(?P<value>.*?)>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}


@pytest.mark.parametrize("text", OWN_CALLS)
@given(cuts=CUTS)
def test_calls_of_a_response_template(tmp_path_factory: pytest.TempPathFactory, text: str, cuts: list[int]) -> None:
    form = declared(tmp_path_factory.mktemp("own"), tool_calls=OWN_CALLS[text])
    told = ("call", "look", RAW if RAW in text else '{"days": 18446744073709551616, "city": " 7 "}')
    other = text.replace("look", "peek")
    assert whole_and_written(form, f"So {other}", cuts) == [("content", f"So {other}")]
    assert whole_and_written(form, f"So{other}{text}", cuts) == [("content", f"So{other}"), told]
    assert read(form.reader(PROMPT, TOOLS), text[:-1], cut=True) == [("content", text[:-1])]
