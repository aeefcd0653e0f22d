"""At the ends of every range the token drawn is that of double precision, alone and among others, on CPU and GPU."""

from __future__ import annotations

import math
from itertools import product

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from longreach.engine.messages import Generate, Sampling
from longreach.engine.requests.request import Request
from longreach.engine.sampling.logit_processors import Draw
from longreach.engine.sampling.sampler import NOT_A_NUMBER, SamplingTensors, sample, uniform
from longreach.util.transfer import moved

from tests.server.engine.sampling_reference import adjusted, is_right

INF = float("inf")
MOST = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny
TEMPERATURES = [0.0, -0.0, 5e-324, 1e-45, 1e-38, TINY, 9.9e-6, 1e-5, 0.7, 2.0]
TOP_PS = [5e-324, 1e-45, TINY, 1e-9, 0.5, 1 - 1e-9, 1.0]
MIN_PS = [0.0, -0.0, 5e-324, 1e-45, 0.5, 1.0]
TOP_KS = [0, 1, 2, 2**31 - 1]
ONE_ULP = float(np.nextafter(np.float32(20), np.float32(0)))
ROWS = {
    "ordinary": [0.3, 2.0, -1.0, 1.7, 0.0, -4.0, 1.9, 0.5],
    "equal": [1.5] * 8,
    "far apart": [-1e30, 1e30, 9e29, -1e30, 0.0, 1e30, 1.0, -1.0],
    "as far as can be": [-MOST, MOST, MOST, 0.0, -MOST, 1.0, MOST, -INF],
    "all at the bottom": [-MOST] * 8,
    "one bit apart": [ONE_ULP, 20.0, ONE_ULP, 20.0, 19.0, ONE_ULP, 20.0, -3.0],
    "subnormal": [0.0, 1e-45, 3e-45, -1e-45, 3e-45, 1e-40, 1e-40, -0.0],
    "few that may be": [-INF, -INF, 3.0, -INF, 2.5, -INF, -INF, 3.0],
    "one that may be": [-INF, -INF, -INF, -INF, -INF, -2e30, -INF, -INF],
    "none that may be": [-INF] * 8,
    "NaN": [1.0, 2.0, float("nan"), 0.0, 1.0, 1.0, 1.0, 1.0],
    "overflowed": [1.0, 2.0, INF, 0.0, 1.0, INF, 1.0, 1.0],
}


def request(how: Sampling, seed: int, prompt: tuple[int, ...] = (0,), generated: tuple[int, ...] = ()) -> Request:
    made = Request.of(Generate(request_id="a", prompt=[*prompt], max_tokens=2**20, sampling=how), seed=seed)
    made.tokens += generated
    return made


def draw(logits: torch.Tensor, made: list[Request]) -> list[int]:
    how = SamplingTensors.of([Draw(one) for one in made], logits.shape[1])
    return sample(logits, moved(how, logits.device)).tolist()


def check_grid(device: str, dtype: torch.dtype) -> None:
    """Every pair of a row and of settings at the ends of their ranges, in one step."""
    grid = [
        Sampling(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
        for temperature, top_p, min_p, top_k in product(TEMPERATURES, TOP_PS, MIN_PS, TOP_KS)
    ]
    made = [request(how, seed) for seed, how in enumerate(grid)]
    for name, row in ROWS.items():
        logits = torch.tensor(row).to(device, dtype)
        drawn = draw(logits.expand(len(made), -1), made)
        exact = logits.float().cpu().numpy()
        wrong = [
            (token, how)
            for token, how, one in zip(drawn, grid, made, strict=True)
            if not is_right(token, exact, how, uniform(one.seed, 0))
        ]
        assert not wrong, (name, exact, len(wrong), wrong[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extremes_give_the_token_of_double_precision(dtype: torch.dtype) -> None:
    check_grid("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extremes_give_the_token_of_double_precision_on_a_gpu(dtype: torch.dtype) -> None:
    check_grid("cuda", dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("width", [1, 2, 33, 5000])
def test_what_asks_for_the_likeliest_token_gets_it(device: str, width: int) -> None:
    randomly = torch.Generator().manual_seed(width)
    for scale in (1e-40, 1e-3, 1.0, 1e4, 1e30):
        # At temperatures such as 0.7 quotients of neighbouring logits may round to one number, and not to the first.
        likely = torch.randint(-2, 3, (1, width), generator=randomly) * 2.0**-20 + 10
        logits = (likely * scale).to(device)
        hows = [Sampling(temperature=t, top_p=p) for t in (0.7, 1.0, 1.9) for p in (5e-324, 1e-45, 1e-7)]
        hows += [Sampling(temperature=t, top_k=1) for t in (1e-5, 0.3, 0.7, 1.0, 1.9)]
        hows += [Sampling(temperature=t) for t in (5e-324, 1e-45, 1e-38, 1e-30, 1e-6)]
        made = [request(how, seed) for seed, how in enumerate(hows)]
        assert set(draw(logits.expand(len(made), -1), made)) == {int(logits.argmax())}


float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = st.lists(
    float32s | st.just(-INF) | st.sampled_from([0.0, -0.0, 1.0, 1e-45, MOST, -MOST]), min_size=1, max_size=9
)


def ends(*numbers: float, least: float, most: float) -> st.SearchStrategy[float]:
    return st.sampled_from(numbers) | st.floats(least, most)


hows = st.builds(
    Sampling,
    temperature=ends(*TEMPERATURES, least=0, most=2),
    top_p=ends(*TOP_PS, least=5e-324, most=1),
    min_p=ends(*MIN_PS, least=0, most=1),
    top_k=st.sampled_from(TOP_KS),
    presence_penalty=ends(-2.0, 0.0, 2.0, 5e-324, least=-2, most=2),
    frequency_penalty=ends(-2.0, 0.0, 2.0, 5e-324, least=-2, most=2),
    repetition_penalty=ends(0.1, 1.0, 10.0, least=0.1, most=10),
    logit_bias=st.dictionaries(st.integers(0, 8), ends(-100.0, 100.0, 0.0, 5e-324, least=-100, most=100), max_size=9),
    seed=st.sampled_from([-(2**63), -1, 0, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=150, deadline=None)
@given(row=rows, other=hows, how=hows, data=st.data())
def test_any_settings_give_the_token_of_double_precision_alone_and_beside_another(
    row: list[float], how: Sampling, other: Sampling, data: st.DataObject
) -> None:
    ids = st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=12)
    made = []
    for one in (how, other):
        inside = {token: bias for token, bias in one.logit_bias.items() if token < len(row)}
        settled = msgspec.structs.replace(one, logit_bias=inside)
        made.append(request(settled, 0, tuple(data.draw(ids)), tuple(data.draw(ids))))
    logits = torch.tensor([row, row[::-1]])
    together = draw(logits, made)
    for token, one, own in zip(together, made, logits, strict=True):
        spec = one.spec
        exact = adjusted(own.numpy(), spec.sampling, spec.prompt, one.tokens[len(spec.prompt) :])
        assert is_right(token, exact, spec.sampling, uniform(one.seed, one.generated)), exact
        assert draw(own[None], [one]) == [token]


def test_penalties_of_large_counts_and_logits_overflow_to_no_other_answer() -> None:
    often = request(Sampling(temperature=0, frequency_penalty=2), 0, generated=(1,) * 70_000 + (2,))
    assert draw(torch.tensor([[-139_000.0, 1000.0, -3.0]]), [often]) == [2]
    assert draw(torch.tensor([[-139_002.0, 1000.0, -INF]]), [often]) == [1]
    for how in (
        Sampling(temperature=0, repetition_penalty=10),
        Sampling(temperature=1, repetition_penalty=10),
        Sampling(temperature=1, repetition_penalty=0.1, logit_bias={0: -100, 1: -100, 2: -100}),
    ):
        every = request(how, 0, prompt=(0, 1, 2))
        # Products beyond float32 are its largest numbers: something can be drawn, and what was forbidden stays so.
        assert draw(torch.tensor([[-MOST, -INF, -INF]]), [every]) == [0]
        assert draw(torch.tensor([[-INF, MOST, -INF]]), [every]) == [1]
        assert draw(torch.tensor([[-INF, -INF, -INF]]), [every]) == [NOT_A_NUMBER]


def test_a_bias_that_makes_all_equal_leaves_the_choice_to_the_number_or_the_first() -> None:
    biases = {token: 100.0 - 25 * token for token in range(8)}
    logits = torch.tensor([[25.0 * token for token in range(8)]])
    assert draw(logits, [request(Sampling(temperature=0, logit_bias=biases), 0)]) == [0]
    made = [request(Sampling(logit_bias=biases), seed) for seed in range(200)]
    drawn = draw(logits.expand(200, -1), made)
    assert drawn == [math.floor(8 * uniform(seed, 0)) for seed in range(200)]
