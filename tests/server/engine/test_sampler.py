"""Drawing tokens: the distribution is the one asked for, and a request's draws depend on itself alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from longreach.engine.messages import Generate, Sampling
from longreach.engine.requests.request import Request
from longreach.engine.requests.token_counts import TokenCounts
from longreach.engine.sampling.logit_processors import Adjustments, Draw
from longreach.engine.sampling.sampler import NOT_A_NUMBER, SamplingTensors, sample, uniform


def requests(how: Sampling, count: int, generated: int = 0, **more) -> list[Request]:
    made = []
    for i in range(count):
        spec = Generate(request_id=str(i), prompt=[0], max_tokens=9, sampling=how, **more)
        made.append(Request.of(spec, seed=i))
        made[-1].tokens += [0] * generated
    return made


def how(made: list[Request], vocab_size: int) -> SamplingTensors:
    return SamplingTensors.of([Draw(one) for one in made], vocab_size)


def draw(logits: torch.Tensor, made: list[Request]) -> torch.Tensor:
    return sample(logits.expand(len(made), -1), how(made, logits.shape[-1]))


def test_temperature_zero_takes_the_first_largest() -> None:
    assert draw(torch.tensor([1.0, 3.0, 3.0, -1.0]), requests(Sampling(temperature=0), 3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Sampling(), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (Sampling(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(top_p=0.7), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(top_p=0.71), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(top_p=1e-6), [1, 0, 0, 0]),
        (Sampling(top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(min_p=0.49), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(min_p=1.0), [1, 0, 0, 0]),
        (Sampling(min_p=0.3, temperature=0.5), [16 / 25, 9 / 25, 0, 0]),
        (Sampling(min_p=0.49, top_p=0.7), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(logit_bias={3: math.log(2), 2: -100}), [0, 0.3 / 0.8, 0.4 / 0.8, 0.1 / 0.8]),
    ],
)
def test_frequencies_are_those_of_the_filtered_distribution(how: Sampling, expected: list[float]) -> None:
    order = torch.tensor([2, 0, 3, 1])  # the likeliest token is not the first
    logits = torch.empty(4)
    logits[order] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    count = 4000
    drawn = draw(logits, requests(how, count))
    frequencies = torch.bincount(drawn, minlength=4)[order] / count
    for frequency, probability in zip(frequencies.tolist(), expected, strict=True):
        # five standard deviations; a token that was filtered out is never drawn
        assert abs(frequency - probability) <= 5 * math.sqrt(probability * (1 - probability) / count)


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    made = [requests(Sampling(temperature=t, seed=i), 1)[0] for i, t in enumerate([1.0, 0.0, 2.0, 0.7, 1.0])]
    everything = Sampling(
        temperature=0.9,
        seed=4,
        min_p=0.01,
        top_p=0.9,
        top_k=30,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        logit_bias={7: 3.0},
    )
    for i in (1, 3):
        made[i] = requests(everything, 1, generated=5, min_tokens=9, stop_token_ids=[3 + i])[0]
    together = sample(logits, how(made, 50))
    alone = [sample(logits[i : i + 1], how([made[i]], 50)).item() for i in range(5)]
    assert together.tolist() == alone


def test_rounding_seldom_changes_a_draw() -> None:
    randomly = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, generator=randomly) * 1e-3  # likely tokens lie closer together than what is rounded
    rounded = logits + 1e-6 * torch.randn(4096, generator=randomly)
    made = requests(Sampling(temperature=1.0, top_p=0.95, min_p=0.01), 500)
    changed = draw(logits, made) != draw(rounded, made)
    assert changed.float().mean() < 0.01
    assert len(draw(logits, made).unique()) > 400


def test_the_seed_and_the_position_decide() -> None:
    assert uniform(1, 5) == uniform(1, 5)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400
    assert all(0 <= uniform(seed, 3) < 1 for seed in range(1000))
    uniform(2**63, 0)  # the largest seeds are as good as any
    uniform(-1, 0)


def test_a_draw_behind_drafts_is_the_one_that_would_come_later() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    settings = Sampling(temperature=1.0, seed=3)
    [now] = requests(settings, 1, min_tokens=4, stop_token_ids=list(range(25)))
    ahead = sample(logits.expand(6, -1), SamplingTensors.of([Draw(now, (0,) * after) for after in range(6)], 50))
    later = [
        draw(logits, requests(settings, 1, generated=count, min_tokens=4, stop_token_ids=list(range(25)))).item()
        for count in range(6)
    ]
    assert ahead.tolist() == later


def test_tokens_that_would_stop_too_early_are_not_drawn() -> None:
    logits = torch.tensor([0.0, 9.0, 1.0])
    early = requests(Sampling(temperature=0), 1, min_tokens=2, stop_token_ids=[1])
    late = requests(Sampling(temperature=0), 1, generated=2, min_tokens=2, stop_token_ids=[1])
    assert draw(logits, early + late).tolist() == [2, 1]


def test_a_row_that_is_not_a_number_is_marked_and_the_others_are_drawn() -> None:
    logits = torch.tensor([[0.0, 2.0], [float("nan"), 1.0], [3.0, 1.0]])
    for temperature in (0.0, 1.0):
        made = requests(Sampling(temperature=temperature, top_k=1), 3)
        assert sample(logits, how(made, 2)).tolist() == [1, NOT_A_NUMBER, 0]


def adjusted(
    logits: list[float], settings: Sampling, prompt: list[int], generated: list[int], drafts: tuple = ()
) -> list:
    one = Request.of(Generate(request_id="a", prompt=prompt, max_tokens=9, sampling=settings), seed=0)
    one.tokens += generated
    return Adjustments.of([Draw(one, drafts)]).apply(torch.tensor([logits])).tolist()[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Sampling(presence_penalty=0.5), [1.0, -2.5, 2.5, 4.0]),
        (Sampling(frequency_penalty=-0.5), [1.0, -1.0, 3.5, 4.0]),
        (Sampling(repetition_penalty=2.0), [0.5, -4.0, 1.5, 4.0]),
        (Sampling(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.25), [0.5, -6.25, 0.25, 4.0]),
        (Sampling(logit_bias={0: -1.5, 3: 2.0}, presence_penalty=0.5), [-0.5, -2.5, 2.5, 6.0]),
    ],
)
def test_penalties_count_what_was_generated_and_repetition_the_prompt_too(
    settings: Sampling, expected: list[float]
) -> None:
    logits = [1.0, -2.0, 3.0, 4.0]
    assert adjusted(logits, settings, [0, 0], [1, 2, 1]) == expected
    # drafts count as if they had been generated
    assert adjusted(logits, settings, [0, 0], [1], (2, 1)) == expected
    assert adjusted(logits, settings, [0, 0], [], (1, 2, 1)) == expected


def test_counts_follow_a_growing_answer_beyond_their_first_room() -> None:
    drawn = [i % 700 for i in range(2000)]
    counts = TokenCounts([5, 5, 900])
    for start in range(0, 2000, 7):
        counts.extend(drawn[start : start + 7])
    ids, times = counts.with_drafts(())
    expected = {token: drawn.count(token) for token in range(700)} | {900: 0}
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == expected
    assert counts.generated == 2000
    ids, times = counts.with_drafts((900, 1000, 1000))
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == expected | {900: 1, 1000: 2}
    assert dict(zip(*(a.tolist() for a in counts.with_drafts(())), strict=True)) == expected


class _Mask:
    error = None

    def __init__(self, *allowed: int) -> None:
        self._bits = np.zeros(2, np.uint8)
        for token in allowed:
            self._bits[token // 8] |= 1 << token % 8

    def mask(self) -> np.ndarray:
        return self._bits

    def accept(self, token: int) -> bool:
        return False


def test_only_allowed_tokens_are_drawn_and_other_rows_are_left_alone() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    few = requests(Sampling(allowed_token_ids=[3, 2]), 300)
    plain = requests(Sampling(), 1)
    drawn = draw(logits, [*few[:150], *plain, *few[150:]]).tolist()
    assert drawn.pop(150) == draw(logits, plain).item()
    assert {*drawn} == {2, 3}
    assert abs(drawn.count(2) / 300 - 2 / 3) < 0.1
    assert draw(logits, requests(Sampling(temperature=0, allowed_token_ids=[3]), 1)).tolist() == [3]


@pytest.mark.parametrize(
    ("answer", "drafts", "words", "forbidden"),
    [
        ([], (), [[0]], {0}),
        ([], (), [[0, 1]], set()),
        ([0], (), [[0, 1]], {1}),
        ([0, 2], (), [[0, 1], [2, 2]], {2}),
        ([2, 0], (), [[2, 0, 1], [1, 0, 3], [0, 0]], {1, 0}),
        ([2], (0,), [[2, 0, 1]], {1}),
        ([0], (2,), [[0, 1]], set()),
        ([1], (), [[9, 1, 3]], set()),  # 9 is the end of the prompt
        ([1], (), [[0, 1, 2, 3, 0], [3]], {3}),
    ],
)
def test_a_bad_word_is_not_completed(
    answer: list[int], drafts: tuple[int, ...], words: list[list[int]], forbidden: set[int]
) -> None:
    one = Request.of(Generate(request_id="a", prompt=[9], max_tokens=9, sampling=Sampling(bad_words=words)), seed=0)
    one.tokens += answer
    logits = Adjustments.of([Draw(one, drafts)]).apply(torch.zeros(1, 4))
    assert {*(logits[0] == float("-inf")).nonzero().flatten().tolist()} == forbidden
    assert one.needs_its_tokens == any(len(word) > 1 for word in words)


def test_only_what_a_grammar_allows_is_drawn() -> None:
    logits = torch.arange(13.0).expand(3, 13)
    made = requests(Sampling(temperature=0), 3)
    made[0].constraint, made[2].constraint = _Mask(2, 9), _Mask()
    # a row in which nothing may be drawn is an error of that row
    assert sample(logits, how(made, 13)).tolist() == [9, 12, NOT_A_NUMBER]
