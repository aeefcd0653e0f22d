"""A patched model trains as the unpatched eager model does: the same loss, the same gradient of every parameter.

Gradients are held to the relative tolerance of the logits, as shares of the largest entry of their tensor: those of a
key's bias peak near 1e-5, where the absolute tolerance would pass anything. What it leaves room for is transformers:
its eager softmax, its norms and its loss compute in float32 even in a float64 model.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from longreach_kernels import Window, attention, ragged_attention, resolve_backend
from longreach_patches import UnsupportedModelError, patch
from longreach_patches import attention as attention_module
from torch import Tensor
from transformers import PreTrainedModel

from tests.patches.conftest import build
from tests.patches.test_patch import TOLERANCE, prompt

LIMIT = TOLERANCE["rtol"]
IGNORED = -100  # the label of tokens that are no target


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small only wait for each other's threads: a hundred times slower on two busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train_step(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss of a training step without a cache, and each parameter's gradient by name."""
    model.train()
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    results = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = parameter.grad.clone()
    return results


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor within ``LIMIT`` of the largest entry of the expected one."""
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        peak = wanted.abs().max()
        assert peak > 0, f"{name}: a gradient of 0 would show nothing"
        error = ((actual[name] - wanted).abs().max() / peak).item()
        assert error <= LIMIT, f"{name}: off by {error:.3g} of its largest entry, {LIMIT:.3g} allowed"


def targets(ids: Tensor) -> dict[str, Tensor]:
    """Model inputs that make each token a target."""
    return {"input_ids": ids, "labels": ids.clone()}


def test_loss_and_gradients_match_eager(eager_model: PreTrainedModel) -> None:
    inputs = targets(prompt(60, batch=2))
    expected = train_step(eager_model, inputs)
    with patch(eager_model, "cpu"):
        assert_same(train_step(eager_model, inputs), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_gradient(eager_model: PreTrainedModel, side: str) -> None:
    eager_model.float()  # transformers' eager masks of rows that see nothing overflow in float64
    inputs = targets(prompt(40, batch=3))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for row, pad in ((1, 7), (2, 23)):
        where = slice(pad) if side == "left" else slice(-pad, None)
        inputs["input_ids"][row, where] = 0
        inputs["attention_mask"][row, where] = 0
        inputs["labels"][row, where] = IGNORED
        if side == "left":  # the first real token would be predicted from a padding row, where attention has no meaning
            inputs["labels"][row, pad] = IGNORED
    expected = train_step(eager_model, inputs)
    with patch(eager_model, "cpu"):
        actual = train_step(eager_model, inputs)
    assert_same(actual, expected)


def test_packed_sequences_match_eager(eager_model: PreTrainedModel) -> None:
    lengths = [20, 33, 11]
    inputs = targets(prompt(sum(lengths)))
    inputs["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    inputs["labels"][inputs["position_ids"] == 0] = IGNORED  # no sequence predicts the next one's first token
    expected = train_step(eager_model, inputs)
    with patch(eager_model, "cpu"):
        assert_same(train_step(eager_model, inputs), expected)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_matches_eager(use_reentrant: bool) -> None:
    model = build("qwen3-mixed")
    inputs = targets(prompt(60, batch=2))
    expected = train_step(model, inputs)
    calls = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with patch(model, "cpu"):
        assert_same(train_step(model, inputs), expected)
    assert len(calls) == 2  # forward, and once more for the backward pass


def test_a_few_optimizer_steps_give_the_same_losses(eager_model: PreTrainedModel) -> None:
    start = {name: x.clone() for name, x in eager_model.state_dict().items()}
    inputs = targets(prompt(48, batch=2))

    def losses() -> Tensor:
        eager_model.load_state_dict(start)
        optimizer = torch.optim.AdamW(eager_model.parameters(), lr=1e-2)
        history = []
        for _ in range(8):
            history.append(train_step(eager_model, inputs)["loss"])
            optimizer.step()
        return torch.stack(history)

    expected = losses()
    assert expected[-1] < 0.9 * expected[0]
    with patch(eager_model, "cpu"):
        torch.testing.assert_close(losses(), expected, rtol=LIMIT, atol=0)


def test_attention_dropout_is_refused_in_training_and_nothing_in_inference() -> None:
    model = build("llama")
    expected = model(prompt(8)).logits
    patch(model, "cpu")
    model.model.layers[1].self_attn.attention_dropout = 0.1
    torch.testing.assert_close(model(prompt(8)).logits, expected)
    with pytest.raises(UnsupportedModelError, match="attention dropout"):
        train_step(model, targets(prompt(8)))


def test_sequences_side_by_side_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, ...]] = []

    def spy(*tensors: Tensor, **options: object) -> Tensor:
        seen.append(tensors)
        return ragged_attention(*tensors, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(attention_module, "ragged_attention", spy)
    layer = attention_module.LayerAttention(0, Window(5), resolve_backend("cpu", torch.device("cpu"), torch.float64))
    module = torch.nn.Module()
    setattr(module, attention_module.LAYER_ATTRIBUTE, layer)
    q, k, v = (torch.randn(3, 20, heads, 8, dtype=torch.float64).transpose(1, 2) for heads in (4, 2, 2))
    out, _ = attention_module.longreach_attention(module, q, k, v, None)
    assert [given.data_ptr() for given in seen[0][:3]] == [x.data_ptr() for x in (q, k, v)]
    assert seen[0][3].tolist() == [0, 20, 40, 60]
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), Window(5), backend="reference")
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)
    attention_module.longreach_attention(module, *(x.contiguous() for x in (q, k, v)), None)
    attention_module.longreach_attention(module, q[:, :, -1:], k, v, None)
    assert len(seen) == 1  # other layouts, and queries at the end of more keys, are a dense batch
