"""The attention that training uses computes what transformers computes, and bounds its window."""

import pytest
import torch
from transformers import SmolLM3ForCausalLM

from training import attention, model


@pytest.fixture(scope="module")
def net() -> SmolLM3ForCausalLM:
    attention.register()
    return model.create(0, pairs=1, hidden=64, mlp=96, window=32)


@pytest.mark.parametrize("length", [32, 64, 160])
def test_outputs_and_gradients_match_eager(net: SmolLM3ForCausalLM, length: int) -> None:
    ids = torch.randint(5, 4096, (2, length), generator=torch.Generator().manual_seed(length))
    found = {}
    for name in ("eager", attention.NAME):
        net.set_attn_implementation(name)
        net.zero_grad()
        hidden = net(input_ids=ids, use_cache=False).logits
        hidden.square().mean().backward()
        gradient = net.get_parameter("model.layers.0.self_attn.k_proj.weight").grad
        assert gradient is not None
        found[name] = hidden.detach(), gradient.clone()
    for ours, theirs in zip(found[attention.NAME], found["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_window_counts_the_query_itself() -> None:
    q, k, v = torch.randn(3, 1, 1, 96, 8, generator=torch.Generator().manual_seed(1))
    out = attention.window(q, k, v, 32, 1.0)
    for back, changes in ((31, True), (32, False)):
        other = v.clone()
        other[0, 0, 90 - back] += 1
        assert bool((attention.window(q, k, other, 32, 1.0)[0, 0, 90] != out[0, 0, 90]).any()) == changes


def test_wrong_use_is_an_error(net: SmolLM3ForCausalLM) -> None:
    net.set_attn_implementation(attention.NAME)
    with pytest.raises(ValueError, match="no multiple of the window"):
        net.model(input_ids=torch.randint(5, 4096, (1, 40)), use_cache=False)
