"""At which positions of a prompt copies of its recurrent state are worth a shorter chunk. Plain numbers.

A copy is taken where a chunk ends, and a chunk that ends early is one more step. So there are few borders, where
somebody is likely to come back to:

    border                                | who comes back
    --------------------------------------+---------------------------------------------------------------
    the last page that the prompt fills   | the same prompt, and a conversation that goes on
    128, 512, 2048, ... tokens before     | another question, of fewer tokens, about the same document
    where two prompts part                | whoever begins like both

Between them, where the chunks of a long prompt end anyway, a copy is left every so many tokens (`spacing`). In an
answer a copy is left at every page, in place of the one before.
"""

from __future__ import annotations

# A copy has to save reading so many tokens: one more step takes the time of reading some hundreds.
LEAST_SAVED = 1024
_FIRST_DISTANCE = 128
_RATIO = 4
# A border at a distance from the end is for prompts that are so many times as long. Without it they would read again
# up to four times the distance, which is little of them.
_LENGTHS_PER_DISTANCE = 64
# Of one prompt's copies between the borders: at most so many, and none nearer than so many tokens.
_MOST_SPACED = 16
_LEAST_SPACING = 8192


def borders(prompt_tokens: int, unit: int, least: int = LEAST_SAVED) -> set[int]:
    """Positions of a prompt, multiples of `unit`, at which its chunks should end; none below `least`.

    The last token of a prompt is always computed, so that a border is before it.
    """
    distances = [1]
    distance = _FIRST_DISTANCE
    while distance * _LENGTHS_PER_DISTANCE <= prompt_tokens:
        distances.append(distance)
        distance *= _RATIO
    ends = {(prompt_tokens - distance) // unit * unit for distance in distances}
    return {end for end in ends if end >= max(least, unit)}


def spacing(prompt_tokens: int, unit: int) -> int:
    """Tokens from one copy to the next where a prompt's chunks end anyway; a multiple of `unit`."""
    return -(-max(_LEAST_SPACING, -(-prompt_tokens // _MOST_SPACED)) // unit) * unit
