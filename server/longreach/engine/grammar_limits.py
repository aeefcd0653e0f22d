"""How complex a grammar may be: for whoever compiles it first, and for the engine."""

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
