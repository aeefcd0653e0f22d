"""Answers of gpt-oss: messages in channels, of which one may be a call or have a form."""

from __future__ import annotations

from collections.abc import Sequence

from longreach.text.grammars.functions import Callee
from longreach.text.grammars.written import Written, literal

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)


def harmony(callees: Sequence[Callee], written: Written, *, formed: bool, begun: str = "") -> list[str]:
    """The rules of an answer, `start` first.

    Arguments:
        formed: words are `@answer`, in the channel `final`, and reasoning alone may stand before them or a call.
        begun: what the prompt has of the message that the answer goes on with: its header, and its text.
    """
    channel, message, start = (written.mark(mark) for mark in (CHANNEL, MESSAGE, START))
    header, in_text, _ = begun.partition(MESSAGE)
    others = written.others(MARKS)
    spoken = '"analysis"' if formed else '("analysis" | "commentary" | "final")'
    if in_text:
        first = "@answer" if formed and "final" in header else "words"
    else:
        first = "message | call"
    ends = {"end": END, "call_end": CALL, "return_end": RETURN}
    rules = [
        f"start: {first}",
        f"message: {channel} {spoken} {message} words",
        f"words: text* end_of_words next | text* to_start header{'' if formed else ' | text* end_of_words?'}",
        f"next: {start} header",
        'header: "assistant" (message | call)',
        f"text: TEXT{'' if others is None else f' | {others}'}",
        f"end_of_words: {' | '.join(ends)}",
        *written.end_of_text("to_start", START),
        *(
            rule
            for name, mark in zip(ends, (END, CALL, RETURN), strict=True)
            for rule in written.end_of_text(name, mark)
        ),
        # The recipient stands behind the channel, or before it.
        f'call: {channel} "commentary" to called | to calling',
        'to: " "? "to=" "functions."?',
        _ways("called", callees, f"constrained? {message}"),
        _ways("calling", callees, f'{channel} "commentary" constrained? {message}'),
        f'constrained: " "? ({written.mark(CONSTRAIN)} " "?)? "json" " "?',
    ]
    if formed:
        rules[1] += f' | {channel} "final" constrained? {message} @answer'
    return rules


def _ways(rule: str, callees: Sequence[Callee], between: str) -> str:
    return f"{rule}: {' | '.join(f'{literal(one.name)} {between} {one.arguments}' for one in callees)}"
