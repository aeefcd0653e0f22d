"""A patched model computes what the unpatched eager model computes, and can be put back."""

from __future__ import annotations

import pytest
import torch
from longreach_kernels import Causal, Window
from longreach_patches import PatchedModel, UnsupportedModelError, layer_masks, patch, rotary_layers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, PreTrainedModel

from tests.patches.conftest import CONFIGS, build

# float64 models, but transformers' own softmax and norms are float32 even then: 1e-6 relative on logits of a few units.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
FLOAT32_TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids (batch, length) without the pad token."""
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@torch.no_grad()
def test_logits_of_a_whole_prompt_match_eager(eager_model: PreTrainedModel, backend: str) -> None:
    ids = prompt(75, batch=2)
    expected = eager_model(ids).logits
    with patch(eager_model, backend):
        torch.testing.assert_close(eager_model(ids).logits, expected, **TOLERANCE)


@torch.no_grad()
def test_prefill_in_chunks_and_decode_match_eager(eager_model: PreTrainedModel) -> None:
    ids = prompt(60)
    expected = eager_model(ids).logits
    with patch(eager_model, "cpu"):
        cache, pieces = None, []
        for start, end in [(0, 31), (31, 50), (50, 51), *((i, i + 1) for i in range(51, 60))]:
            out = eager_model(ids[:, start:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
        torch.testing.assert_close(torch.cat(pieces, 1), expected, **TOLERANCE)


@torch.no_grad()
def test_generate_with_left_padding_matches_eager(eager_model: PreTrainedModel) -> None:
    eager_model.float()  # transformers' eager masks of rows that see nothing overflow in float64
    ids = prompt(40, batch=3)
    mask = torch.ones_like(ids)
    for row, pad in enumerate([0, 7, 23]):
        ids[row, :pad], mask[row, :pad] = 0, 0
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = eager_model.generate(ids, **arguments)
    with patch(eager_model, "cpu"):
        assert torch.equal(eager_model.generate(ids, **arguments), expected)


@torch.no_grad()
def test_right_padding_matches_eager_on_the_real_tokens(eager_model: PreTrainedModel) -> None:
    eager_model.float()  # as above
    ids = prompt(40, batch=2)
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    expected = eager_model(ids, attention_mask=mask).logits
    with patch(eager_model, "cpu"):
        actual = eager_model(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[0], expected[0], **FLOAT32_TOLERANCE)
    torch.testing.assert_close(actual[1, :25], expected[1, :25], **FLOAT32_TOLERANCE)


@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(eager_model: PreTrainedModel) -> None:
    lengths = [20, 33, 11]
    ids = prompt(sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    expected = torch.cat([eager_model(part).logits for part in ids.split(lengths, 1)], 1)
    with patch(eager_model, "cpu"):
        actual = eager_model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_masks_say_what_transformers_passes_to_each_layer(name: str) -> None:
    model = build(name)
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    if name == "mistral-window":  # Mistral hands the config's window to every layer instead of keeping it on the module
        windows = [17, 17, 17]
    assert layer_masks(model.config) == tuple(Causal() if w is None else Window(w) for w in windows)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_layers_have_rotary_positions_where_transformers_turns_queries(name: str) -> None:
    model = build(name)
    used = tuple(bool(getattr(layer.self_attn, "use_rope", True)) for layer in model.model.layers)
    assert rotary_layers(model.config) == used
    assert all(used) == (name != "smollm3-mixed")


def test_undo_restores_the_model_and_nothing_leaks_to_another() -> None:
    model, other = build("llama"), build("llama")
    layer = model.model.layers[0]
    before = dict(layer.self_attn.__dict__), dict(layer.input_layernorm.__dict__)
    handle = patch(model, "cpu")
    assert model.config._attn_implementation == "longreach"
    assert other.config._attn_implementation == "eager"
    assert "forward" in layer.input_layernorm.__dict__
    assert "forward" not in other.model.layers[0].input_layernorm.__dict__
    handle.undo()
    handle.undo()
    assert model.config._attn_implementation == "eager"
    assert (layer.self_attn.__dict__, layer.input_layernorm.__dict__) == before
    assert isinstance(patch(model, "cpu"), PatchedModel)


def test_norms_stay_as_they_are_where_that_is_asked() -> None:
    model = build("llama")
    expected = model(prompt(20)).logits
    with patch(model, "cpu", fuse_norms=False):
        assert "forward" not in model.model.layers[0].input_layernorm.__dict__
        torch.testing.assert_close(model(prompt(20)).logits, expected, **TOLERANCE)


def test_patching_twice_is_refused() -> None:
    model = build("llama")
    patch(model, "cpu")
    with pytest.raises(UnsupportedModelError, match=r"undo\(\)"):
        patch(model, "cpu")


def test_an_unsupported_family_is_named() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50))
    with pytest.raises(UnsupportedModelError, match="'gpt2' is not supported: it has learned positions"):
        patch(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": False}, "bidirectional"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantized weights .*gptq.*16 bits"),
        ({"compression_config": {"format": "pack-quantized"}}, r"quantized weights \(compression_config"),
    ],
)
def test_a_missing_feature_is_named(change: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        layer_masks(LlamaConfig(**change))


@torch.no_grad()
def test_what_cannot_be_computed_is_refused_and_not_ignored() -> None:
    model = build("llama")
    ids = prompt(8, batch=2)
    patch(model, "cpu")
    holes = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1], [1] * 8])
    with pytest.raises(UnsupportedModelError, match="holes"):
        model(ids, attention_mask=holes)
    with pytest.raises(UnsupportedModelError, match="static length"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(UnsupportedModelError, match="output_attentions"):
        model(ids, output_attentions=True)


class _LargestOutput(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return out


@torch.no_grad()
def test_a_long_prompt_makes_no_tensor_of_size_n_by_n() -> None:
    length = 4096
    model = build("smollm3-mixed").float()
    model.config.max_position_embeddings = length
    ids = prompt(length)
    with _LargestOutput() as eager:
        model(ids[:, :512], logits_to_keep=1)
    assert eager.largest >= 512 * 512  # the meter sees the eager model's square
    with patch(model, "cpu"), _LargestOutput() as patched:
        model(ids, logits_to_keep=1)
    assert patched.largest < length * length / 4  # a square of bools would be 16 MiB
