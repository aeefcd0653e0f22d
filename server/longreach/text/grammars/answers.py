"""Whole answers: a call or a form, and words with calls among them.

| answer | may be |
|---|---|
| `call_or_answer` | calls alone, or `@answer` |
| `words_and_calls` | any text; behind a mark that begins calls, a call |

Reasoning is free in both. A mark is decided by its last character or token, so that words are never held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from longreach.text.grammars import harmony, json_formats, llama, tag_formats
from longreach.text.grammars.functions import Callee
from longreach.text.grammars.json_formats import Marked
from longreach.text.grammars.written import Written, plain

_HARMONY, _UNMARKED = "harmony", "llama3_json"
_TAGS = {
    "qwen3_coder": tag_formats.QWEN,
    "seed_oss": tag_formats.SEED,
    "glm": tag_formats.GLM,
    "minimax_m2": tag_formats.MINIMAX,
    "hy_v3": tag_formats.GLM,
}
# By the names of the formats.
_MARKED: Mapping[str, Callable[[Sequence[Callee], Written, bool], Marked]] = {
    "hermes": json_formats.hermes,
    "mistral": json_formats.mistral,
    "deepseek": json_formats.deepseek,
    "qwen3_coder": tag_formats.qwen3_coder,
    "seed_oss": tag_formats.seed_oss,
    "glm": tag_formats.glm,
    "minimax_m2": tag_formats.minimax_m2,
    "hy_v3": tag_formats.hy_v3,
    "hunyuan": json_formats.hunyuan,
    "granite": json_formats.granite,
    "phi4_mini": json_formats.phi4_mini,
    "toolcall": json_formats.toolcall,
    "cohere": json_formats.cohere,
    "apertus": json_formats.apertus,
    _UNMARKED: llama.llama3_json,
}
_TOKENS = ["TEXT: /(?s:.+)/", "BLANK: /[ \\t\\r\\n]+/"]


@dataclass(frozen=True)
class Thinking:
    """Reasoning around an answer.

    Attributes:
        opening, closing: its marks.
        begun: the answer begins inside of it.
    """

    opening: str
    closing: str
    begun: bool = False


def has_call_grammar(call_format: str) -> bool:
    """Whether the calls of a format can be part of a grammar."""
    return call_format in _MARKED or call_format == _HARMONY


def is_in_tags(call_format: str) -> bool:
    """Whether arguments are written in tags, without quotes."""
    return call_format in _TAGS


def closing_of(call_format: str) -> str:
    """The tag that closes a value in tags."""
    return _TAGS[call_format].value[1]


def has_mark(call_format: str) -> bool:
    """Whether a mark tells a call from an answer that is JSON."""
    return call_format != _UNMARKED


def call_or_answer(
    call_format: str,
    callees: Sequence[Callee],
    written: Written,
    *,
    parallel: bool = True,
    thinking: Thinking | None = None,
    begun: str = "",
) -> str:
    """The main grammar of an answer that is calls or else `@answer`.

    Where no mark tells calls from JSON, `@answer` has a call among its ways, and `@calls` is a call alone.

    Arguments:
        call_format: of those that `has_call_grammar`.
        parallel: there may be several calls.
        thinking: what may stand before either.
        begun: as in `harmony`.
    """
    if call_format == _HARMONY:
        return _lark(harmony.harmony(callees, written, formed=True, begun=begun))
    if call_format == _UNMARKED:
        again = ' (BLANK? ";" BLANK? @calls)*' if parallel else ""
        rules = [f"calls: {written.mark(llama.TAG)} BLANK? @calls{again}"]
    else:
        marked = _MARKED[call_format](callees, written, parallel)
        mark, after = next(iter(marked.after.items()))
        again = "" if marked.again is None or not parallel else f" ({marked.again} one)*"
        rules = [f"calls: one{again}", f"one: {written.mark(mark)} {after}", *marked.rules]
    start = "calls | @answer"
    if thinking is None:
        return _lark([f"start: {start}", *rules])
    return _lark(
        [
            f"start: {'thought' if thinking.begun else '(opened thought)?'} BLANK? ({start})",
            *([] if thinking.begun else [f"opened: {written.mark(thinking.opening)}"]),
            "thought: TEXT? thought_end",
            *written.end_of_text("thought_end", thinking.closing),
            *rules,
        ]
    )


def words_and_calls(
    call_format: str,
    callees: Sequence[Callee],
    written: Written,
    *,
    thinking: Thinking | None = None,
    begun: str = "",
) -> str:
    """The main grammar of an answer of words, reasoning and calls; the arguments are those of `call_or_answer`."""
    if call_format == _HARMONY:
        return _lark(harmony.harmony(callees, written, formed=False, begun=begun))
    marked = _MARKED[call_format](callees, written, True)
    opening = [] if thinking is None else [thinking.opening]
    others = written.others([*marked.after, *opening])
    again = "" if thinking is None else " reasoning?"
    pieces = ["TEXT", *([] if others is None else [others])]
    rules = [*marked.rules]
    for number, (mark, after) in enumerate(marked.after.items()):
        pieces.append(f"TEXT? begins{number} {after}{again}")
        rules += written.end_of_text(f"begins{number}", mark)
    start = "piece*"
    if not has_mark(call_format):
        start, again = f"first?{again} piece*", ""
    if thinking is not None:
        reasoned = f"thought {start} | thinking*" if thinking.begun else f"reasoning? {start} | opened thinking*"
        start = reasoned
        inner = written.others([thinking.closing])
        rules += [
            "reasoning: opened thought",
            f"thinking: TEXT{'' if inner is None else f' | {inner}'}",
            "thought: thinking* thought_end",
            *written.end_of_text("thought_end", thinking.closing),
            *_opened(thinking.opening, written),
        ]
    return _lark([f"start: {start}", f"piece: {' | '.join(pieces)}", *rules])


def _opened(mark: str, written: Written) -> list[str]:
    """The mark of reasoning, behind blank space: spelled out, it must win over words that begin like it."""
    token = written.token_ids.get(mark)
    spelled = f"opened_spelled[lazy]: /[ \\t\\r\\n]*{plain(mark)}/"
    return [spelled, "opened: opened_spelled" if token is None else f"opened: BLANK? <[{token}]> | opened_spelled"]


def _lark(rules: Sequence[str]) -> str:
    text = "\n".join(rules)
    return "\n".join([text, *(token for token in _TOKENS if token.split(":")[0] in text)])
