"""How prompts end: the chat template, a bare question, an answer cue, or the beginning of the answer's sentence."""

from __future__ import annotations

FORMS = ("chat", "bare", "cue", "stem")
ENDINGS: dict[str, tuple[str, ...]] = {
    "chat": ("{q}",),
    "bare": ("{q}", "{q}\n", "{q}\n", "{q}\n\n"),
    "cue": (
        "{q}\nAnswer:",
        "{q}\nAnswer:",
        "{q} Answer:",
        "{q}\n\nAnswer:",
        "{q}\nAnswer: ",
        "{q}\nAnswer:\n",
        "Question: {q}\nAnswer:",
        "Question: {q}\n\nAnswer:",
        "Question: {q} Answer:",
        "Q: {q}\nA:",
        "Question: {q}\n",
        "User: {q}\nAssistant:",
        "### Question\n{q}\n### Answer\n",
        "{q}\nThe answer is",
        "{q}\nA:",
    ),
    "stem": ("{s}", "{s}", "{q} {s}", "{q} Answer: {s}", "{q}\nAnswer: {s}", "{q}\n{s}"),
}
# A question that stands before the document, and what then asks for its answer.
EARLY = ("Question: {q}", "{q} The text follows.", "{q}\nAnswer after the text.", "I will ask: {q}", "{q}")
EARLY_CUES = ("Answer:", "The answer is", "A:", "Now answer the question.\nAnswer:")
SEPARATORS = ("\n", "\n", "\n\n", "\n\n", " ", "\n---\n", "\n\n---\n\n")


def gap(before: str) -> str:
    """What stands between the prompt's text and the answer: every answer begins with one space."""
    return "" if before.endswith(" ") else " "
