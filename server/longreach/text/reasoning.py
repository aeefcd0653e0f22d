"""How models mark their reasoning before an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PROMPT_END = 256  # characters, which hold any mark and the blank space behind it


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks around reasoning, each with its spellings.

    Attributes:
        models: that write them, for the documentation.
        opens: begin it; the prompt may already end with one.
        closes: end it.
        frames: pairs of marks of which one may stand around the words of an answer. They are no part of it.
        shown_with: another text that the chat templates of these models have.
    """

    models: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    frames: tuple[tuple[str, str], ...] = ()
    shown_with: str = ""

    def is_seen_in(self, chat_template: str) -> bool:
        """Whether a chat template is of a model that marks its reasoning so."""
        return self.shown_with in chat_template and any(mark in chat_template for mark in self.opens)

    def opened_by(self, prompt: str, begun: str | None = None) -> bool:
        """Whether the answer begins inside of reasoning: by the end of the prompt, or by what has `begun`, the message
        that the answer goes on with."""
        if begun is not None:
            opened, closed = (max(map(begun.rfind, marks)) for marks in (self.opens, self.closes))
            return opened > closed
        return prompt[-_PROMPT_END:].rstrip().endswith(self.opens)


# The first whose mark stands in the chat template is the model's.
REASONING: Sequence[ReasoningMarks] = (
    ReasoningMarks("Seed-OSS", ("<seed:think>",), ("</seed:think>",)),
    ReasoningMarks("Magistral, Ministral 3", ("[THINK]",), ("[/THINK]",)),
    ReasoningMarks(
        "Command R7B, Command A",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
    ),
    ReasoningMarks(
        "Hunyuan A13B, and 0.5B to 7B", ("<think>",), ("</think>",), (("<answer>", "</answer>"),), "<answer>"
    ),
    ReasoningMarks("DeepSeek R1 and V3.1, Qwen 3, GLM 4.5, SmolLM3 and most others", ("<think>",), ("</think>",)),
    ReasoningMarks(
        "Granite 3.2",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
)


def reasoning_marks(chat_template: str) -> ReasoningMarks | None:
    """The marks that a chat template is seen to use."""
    return next((marks for marks in REASONING if marks.is_seen_in(chat_template)), None)
