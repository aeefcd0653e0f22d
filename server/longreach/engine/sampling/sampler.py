"""From logits to tokens, for all rows of a step at once.

A row's randomness comes from its request's seed and the number of tokens drawn before it, and from nothing else: the
same request gives the same tokens alone, in a batch, or after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from longreach.engine.sampling.logit_processors import Adjustments, Draw
from longreach.engine.sampling.row_invariant import softmax

# Probabilities are counted in such parts of one. Sums of whole numbers are exact, and so do not depend on the order in
# which a GPU adds, which differs from one number of rows to another.
_PARTS = 2.0**40
NOT_A_NUMBER = -1  # stands for a token where a row's logits had no softmax


@dataclass(frozen=True)
class SamplingTensors:
    """How each of R rows is to be drawn; made on the host, and moved to the logits' device as a whole.

    Attributes:
        temperature, top_p, min_p, uniform: (R,) float32; `temperature` is 0 where the likeliest token is to be drawn,
            and never a subnormal number; `uniform` is the row's random number in [0, 1).
        top_k: (R,) int64, the vocabulary's size where there is no limit.
        adjustments: what is done to the logits first.
        all_greedy: every row has temperature 0.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    top_k: torch.Tensor
    adjustments: Adjustments
    all_greedy: bool

    @classmethod
    def of(cls, draws: list[Draw], vocab_size: int) -> SamplingTensors:
        """Collect the settings of the tokens that are drawn in this step, in the order of their rows."""
        specs = [draw.request.spec.sampling for draw in draws]
        numbers = torch.tensor(
            [
                [0.0 if spec.is_greedy else spec.temperature for spec in specs],
                [spec.top_p for spec in specs],
                [spec.min_p for spec in specs],
                [uniform(draw.request.seed, draw.request.generated + draw.after) for draw in draws],
            ],
            dtype=torch.float32,
        )
        top_k = torch.tensor([min(spec.top_k or vocab_size, vocab_size) for spec in specs])
        return cls(
            temperature=numbers[0],
            top_p=numbers[1],
            min_p=numbers[2],
            uniform=numbers[3],
            top_k=top_k,
            adjustments=Adjustments.of(draws),
            all_greedy=all(spec.is_greedy for spec in specs),
        )


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` and `position` alone (Philox, a counter-based generator)."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position).random_raw()
    # 24 bits: what a float32 below 1 can hold. With more, the largest numbers would round up to 1.
    return float(int(bits) >> 40) / 2**24


def sample(logits: torch.Tensor, how: SamplingTensors) -> torch.Tensor:
    """Draw one token a row: logits (R, V) of any float dtype -> (R,) int64.

    After the adjustments, temperature 0 takes the first largest logit. Otherwise the logits are divided by the
    temperature; all but the `top_k` largest, all with less than `min_p` times the largest probability, and all beyond
    the smallest set with mass `top_p` of what is left are dropped; and the token is the one where the cumulative mass
    of the rest, in the order of the vocabulary, passes `uniform`. The first largest logit is never dropped. A row with
    a logit that is NaN or positive infinity, or with none that may be drawn, gives NOT_A_NUMBER.
    """
    logits = logits.float()
    broken = ~(logits < float("inf")).all(-1)  # NaN is not less either
    logits = how.adjustments.apply(logits)
    broken |= logits.amax(-1) == float("-inf")
    greedy = logits.argmax(-1)
    tokens = greedy if how.all_greedy else torch.where(how.temperature == 0, greedy, _draw(logits, how))
    return tokens.masked_fill(broken, NOT_A_NUMBER)


def _draw(logits: torch.Tensor, how: SamplingTensors) -> torch.Tensor:
    # Rows with temperature 0 pass through here too (no wait for the device to find them); their result is not used.
    temperature = torch.where(how.temperature == 0, 1.0, how.temperature)
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    # Less the first, the numbers of a row are 0 or below: at any temperature none overflows but to a probability of 0.
    # In place, since rows are as wide as the vocabulary.
    mass = softmax(ordered.sub_(ordered[:, :1].clone()).div_(temperature[:, None]))
    dropped = (rank >= how.top_k[:, None]) | (mass < how.min_p[:, None] * mass[:, :1])
    counts = (mass * _PARTS).to(torch.int64).masked_fill_(dropped, 0)
    cumulative = counts.cumsum(-1)
    total = cumulative[:, -1:].double()
    # What is before a token decides whether it stays: the first one that passes top_p does. Nothing is before the
    # likeliest, which stays even where float32 has no number for so small a top_p.
    beyond = cumulative - counts >= how.top_p[:, None].double() * total
    counts = counts.masked_fill((rank > 0) & beyond, 0)
    # Likely tokens lie close together, and the last bit of a logit can change which comes first. In the order of the
    # vocabulary each stays where it is, so that rounding moves a limit between two tokens a little, and no token.
    cumulative = torch.zeros_like(counts).scatter_(-1, tokens, counts).cumsum(-1)
    target = how.uniform[:, None].double() * cumulative[:, -1:].double()
    # The first place where the cumulative mass exceeds the target; a token without mass never is that place.
    return (cumulative <= target).sum(-1).clamp(max=counts.shape[1] - 1)
