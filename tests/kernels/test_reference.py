import pytest
import torch
import torch.nn.functional as F
from longreach_kernels import Causal, Full, Window
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall

from tests.kernels.accuracy import paged, qkv


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_what_torch_computes(causal):
    q, k, v = qkv(2, 4, 2, 50, 50, 32, torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out, lse = reference.attention(q, k, v, AttentionCall(Causal() if causal else Full(), scale=32**-0.5))
    torch.testing.assert_close(out, expected)
    scores = q @ k.repeat_interleave(2, 1).mT * 32**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(50, 50).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_rows_that_see_nothing_give_zero_and_minus_infinity():
    q, k, v = qkv(1, 1, 1, 5, 3, 8)
    out, lse = reference.attention(q, k, v, AttentionCall(Causal(), scale=1.0))
    assert not out[:, :, :2].any()
    assert torch.isneginf(lse[:, :, :2]).all()
    assert torch.isfinite(lse[:, :, 2:]).all()


def test_a_sink_logit_is_a_key_without_a_value():
    q, k, v = qkv(1, 2, 1, 4, 6, 8, torch.float64)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    out, lse = reference.attention(q, k, v, AttentionCall(Full(), scale=1.0, sink_logits=sinks))
    for head in range(2):
        scores = torch.cat([q[0, head] @ k[0, 0].T, sinks[head].expand(4, 1)], 1)
        torch.testing.assert_close(out[0, head], scores.softmax(-1)[:, :6] @ v[0, 0])
        torch.testing.assert_close(lse[0, head], scores.logsumexp(-1))


def test_a_softcap_bounds_the_logits():
    q, k, v = qkv(1, 1, 1, 4, 6, 8, torch.float64)
    scores = 2.0 * torch.tanh(q @ k.mT * 100 / 2.0)
    out, _ = reference.attention(q, k, v, AttentionCall(Full(), scale=100.0, softcap=2.0))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


def test_pages_hold_what_a_dense_sequence_holds():
    q, k_pages, v_pages, batch = paged([7, 1], [19, 5], 4, 2, 1, 16)
    out, _ = reference.paged_attention(q, k_pages, v_pages, batch, AttentionCall(Window(6), scale=0.25))
    pages = batch.page_table[0, :5].long()
    k, v = (x[pages].flatten(0, 1)[:19].transpose(0, 1)[None] for x in (k_pages, v_pages))
    expected, _ = reference.attention(q[None, :7].transpose(1, 2), k, v, AttentionCall(Window(6), scale=0.25))
    torch.testing.assert_close(out[:7], expected[0].transpose(0, 1))
