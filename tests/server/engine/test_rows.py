"""Functions of rows of logits: right, and the same bits for a row whichever are beside it."""

from __future__ import annotations

import pytest
import torch
from longreach.engine.messages import Sampling
from longreach.engine.sampling import row_invariant as rows
from longreach.engine.sampling.sampler import sample
from longreach.util.transfer import moved

from tests.server.engine.test_sampler import how, requests


@pytest.mark.parametrize("width", [1, 5, 8])
def test_softmax_is_torchs(width: int) -> None:
    logits = torch.randn(3, width)
    torch.testing.assert_close(rows.softmax(logits), logits.softmax(-1))
    torch.testing.assert_close(rows.log_softmax(logits), logits.log_softmax(-1))


def test_the_likeliest_come_first_and_of_equal_ones_the_first() -> None:
    logprobs = torch.tensor([[-1.5, -0.25, -3.0, -0.25, float("-inf"), -0.25], [0.5, 2.0, -1.0, 2.0, 0.0, 7.0]])
    assert rows.likeliest(logprobs, 5).tolist() == [[1, 3, 5, 0, 2], [5, 1, 3, 0, 4]]
    assert rows.likeliest(logprobs, 0).shape == (2, 0)


def test_the_likeliest_are_those_of_topk() -> None:
    logprobs = torch.randn(4, 999).log_softmax(-1)
    assert torch.equal(rows.likeliest(logprobs, 20), logprobs.topk(20).indices)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1030, 32001, 128256])
def test_a_row_has_the_same_bits_among_any_others(width: int) -> None:
    count = 67
    logits = torch.randn(count, width, device="cuda").mul(3).bfloat16().float()  # with many that are equal
    made = requests(Sampling(temperature=0.8, top_p=0.9, min_p=1e-4), count)
    device = logits.device
    together = rows.softmax(logits), rows.log_softmax(logits), rows.likeliest(logits, 20)
    drawn = sample(logits, moved(how(made, width), device))
    for first, last in ((0, 1), (1, 2), (3, 40), (66, 67)):
        some = logits[first:last].clone()
        apart = rows.softmax(some), rows.log_softmax(some), rows.likeliest(some, 20)
        for one, other in zip(apart, together, strict=True):
            assert torch.equal(one, other[first:last])
        assert torch.equal(sample(some, moved(how(made[first:last], width), device)), drawn[first:last])
