"""The benchmark of rotary tables: its prompts have their length, one key each, and end where the digits follow."""

from __future__ import annotations

from longreach.config import EMBEDDED_MODEL
from longreach.text.tokenizer import Tokenizer

from benchmarks.rope_by_request import with_key


def test_a_prompt_has_one_key_and_ends_before_its_digits() -> None:
    tokenizer = Tokenizer.load(str(EMBEDDED_MODEL))
    text = tokenizer.encode_here("It rains in the valley today. " * 400, special=False)
    for number in range(3):
        prompt, digits = with_key(tokenizer, text, 600, number)
        assert len(prompt) == 592, "eight tokens are left for the answer"
        detokenizer = tokenizer.detokenizer()
        shown = "".join(map(detokenizer.push, prompt)) + detokenizer.flush()
        assert shown.count(digits) == 1
        assert shown.endswith(" is")
    assert with_key(tokenizer, text, 600, 0) == with_key(tokenizer, text, 600, 0)
