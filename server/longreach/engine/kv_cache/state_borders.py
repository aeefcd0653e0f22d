"""At which positions of a prompt copies of its recurrent state are worth a shorter chunk. Plain numbers.

A copy is taken where a chunk ends, and a chunk that ends early is one more step. So there are few borders, where
somebody is likely to come back to:

    border                                | who comes back
    --------------------------------------+---------------------------------------------------------------
    128 tokens before a prompt's end      | the same prompt, a short question about the same document, the
                                          | conversation's next turn
    512, 2048, ... tokens before it       | a longer question about the same, longer document
    where two prompts part                | whoever begins like both

Between them, where the chunks of a long prompt end anyway, a copy is left every so many tokens (`spacing`). In an
answer a copy is left at every page, in place of the one before: a conversation that goes on comes back to that. Short
answers end before the page does. So prompts of a few hundred tokens have a border, too, but where many begin alike.
"""

from __future__ import annotations

from dataclasses import dataclass

_RATIO = 4
# A border at a further distance from the end is for prompts that are so many times as long. Without it they would read
# again up to four times the distance, which is little of them.
_LENGTHS_PER_DISTANCE = 64
# Of one prompt's copies between the borders: at most so many, and none nearer than so many tokens.
_MOST_SPACED = 16
_LEAST_SPACING = 8192


@dataclass(frozen=True)
class BorderRule:
    """Where copies are left.

    Attributes:
        least_saved: tokens that a copy has to save reading whoever asks, also where many prompts begin alike and end
            with a question each; one more step takes the time of reading some hundreds.
        distance: tokens between the last border and the prompt's end.
    """

    least_saved: int = 1024
    distance: int = 128

    def borders(self, prompt_tokens: int, unit: int) -> set[int]:
        """Positions of a prompt, multiples of `unit`, at which its chunks should end, whatever is cached."""
        distances = [self.distance]
        while distances[-1] * _RATIO * _LENGTHS_PER_DISTANCE <= prompt_tokens:
            distances.append(distances[-1] * _RATIO)
        ends = {(prompt_tokens - distance) // unit * unit for distance in distances}
        return {end for end in ends if end >= max(self.least_saved, unit)}

    def last(self, prompt_tokens: int, unit: int) -> int:
        """The position that is nearest to a prompt's end, a multiple of `unit`; 0 where the prompt is too short."""
        return max(0, (prompt_tokens - self.distance) // unit * unit)

    def is_worth(self, saved: int) -> bool:
        """Whether a border is worth a step if somebody is expected who then reads `saved` tokens less.

        Where two prompts part, others that begin alike have come already. After a turn another one comes.
        """
        return saved >= max(1, self.least_saved // 4)

    def spacing(self, prompt_tokens: int, unit: int) -> int:
        """Tokens from one copy to the next where a prompt's chunks end anyway; a multiple of `unit`."""
        return -(-max(_LEAST_SPACING, -(-prompt_tokens // _MOST_SPACED)) // unit) * unit
