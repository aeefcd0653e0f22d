"""How complex a grammar may be, and what is said of one that cannot be followed: by whoever compiles it first, and by
the engine."""

from __future__ import annotations

from llguidance import LLParserLimits

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def explained(error: str) -> str:
    """llguidance's error on one line, of at most 300 characters; in plain words where it has none."""
    text = " ".join(error.split())
    if text.startswith("NoExtension"):
        return "there is no text that it allows"
    return text[:300]
