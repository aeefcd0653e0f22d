"""Families that transformers' own layers serve: softcap, learned sinks and experts, under every kind of policy."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.policies.masks import mask_of
from longreach.policies.parse import policy_of
from longreach.policies.values import DENSE, AttentionPolicy, Strided, Window
from longreach_kernels import Causal
from longreach_kernels import Window as WindowMask
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.patches.families.configs import WINDOW, config_of, random_model
from tests.server.engine.driving import drain

FAMILIES = ("gemma2", "gpt_oss", "qwen3_moe", "olmo3", "cohere2", "gemma4_text", "gemma4_text-k_is_v", "gemma3n_text")
LENGTH = 300
POLICIES: dict[str, AttentionPolicy] = {
    "dense": DENSE,
    "window": Window(size=100, sinks=3),
    "strided": Strided(stride=256, per_head=False),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    config = config_of(request.param)
    if getattr(config, "sliding_window", None) and len(config.layer_types) == 4:  # more of what a policy changes
        config.layer_types = ["sliding_attention", "full_attention"] * 2
    random_model(config, torch.float32).save_pretrained(path)
    return path


def build(model_dir: Path, **changes: object) -> Engine:
    settings = {"max_num_seqs": 16, "max_batched_tokens": 128, "page_size": 16, "kv_cache_bytes": 1 << 23}
    return build_engine(EngineConfig(model=str(model_dir), device="cpu", **(settings | changes)))[0]  # type: ignore[arg-type]


def spec(name: str, attention: AttentionPolicy, length: int = LENGTH, max_tokens: int = 6) -> Generate:
    prompt = torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    how = Sampling(temperature=0.0)
    return Generate(request_id=name, attention=attention, prompt=prompt, max_tokens=max_tokens, sampling=how)


def eager(model_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float32).eval()


def bias(length: int, policy: AttentionPolicy) -> dict[str, torch.Tensor]:
    """The masks of full and of windowed layers under a policy, written out whole."""
    at = torch.arange(length)
    seen = mask_of(policy).allowed(at, at)
    own = {"full_attention": Causal(), "sliding_attention": WindowMask(WINDOW)}
    return {
        kind: torch.zeros(length, length).masked_fill(~(seen & mask.allowed(at, at)), -math.inf)[None, None]
        for kind, mask in own.items()
    }


@torch.no_grad()
def eager_tokens(model: PreTrainedModel, one: Generate) -> list[int]:
    tokens = list(one.prompt)
    mixed = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    for _ in range(one.max_tokens):
        masks = bias(len(tokens), one.attention)
        mask = masks if mixed else masks["full_attention"]
        logits = model(torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(one.prompt) :]


def test_answers_are_those_of_transformers_under_every_policy_alone_and_together(model_dir: Path) -> None:
    model = eager(model_dir)
    requests = [
        spec(f"{name} {length}", policy, length) for name, policy in POLICIES.items() for length in (LENGTH, 77)
    ]
    engine = build(model_dir, max_batched_tokens=100)
    for one in requests:
        assert engine.submit(one) is None
    together, _, failures = drain(engine)
    assert not failures
    assert together == {one.request_id: eager_tokens(model, one) for one in requests}
    assert len({tuple(tokens) for name, tokens in together.items() if name.endswith(str(LENGTH))}) > 1


def test_a_budget_that_holds_all_keys_gives_the_dense_answer(model_dir: Path) -> None:
    engine = build(model_dir, page_bounds=True, page_size=128, max_batched_tokens=1024)
    dense, budget = spec("dense", DENSE), spec("budget", policy_of("dynamic:0.95:512").resolve())
    for one in (dense, budget):
        assert engine.submit(one) is None
    tokens, _, failures = drain(engine)
    assert not failures
    assert tokens["budget"] == tokens["dense"] == eager_tokens(eager(model_dir), dense)


def test_the_log_says_which_layers_compute(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build(model_dir)
    assert "layers are transformers' own, with our attention: for the family" in caplog.text


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_kept_mass_is_that_of_dense_attention_and_a_learned_sink_counts_as_kept(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    config.num_hidden_layers, config.layer_types = 2, ["sliding_attention", "full_attention"]
    random_model(config, torch.float32).save_pretrained(tmp_path)
    one = spec("a", Window(size=100, sinks=3), max_tokens=1)
    engine = build(tmp_path)
    engine.submit(one)
    [use] = [update.attention for update in drain(engine)[1]["a"] if update.attention is not None]
    assert use.kept_mass is not None
    from longreach.engine.device.policies.mass_samples import sampled

    positions = sampled(LENGTH, 0, LENGTH)
    masks = bias(LENGTH, DENSE) | {"sliding_attention": bias(LENGTH, one.attention)["sliding_attention"]}
    with torch.no_grad():
        weights = (
            eager(tmp_path)(torch.tensor([one.prompt]), attention_mask=masks, use_cache=False, output_attentions=True)
            .attentions[1][0]
            .double()
        )
    at = torch.arange(LENGTH)
    seen = mask_of(one.attention).allowed(at, at)
    exact = ((weights * seen).sum(-1) + 1 - weights.sum(-1)).T[positions]
    assert use.kept_mass.mean == pytest.approx(exact.mean().item(), abs=1e-5)
    assert use.kept_mass.least == pytest.approx(exact.min().item(), abs=1e-5)
    assert exact.min() < 0.95


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: layers of the family 'olmo3' are transformers' own"),
        ({"context_parallel_size": 2}, "--context-parallel-size: layers of the family 'olmo3' are transformers' own"),
    ],
)
def test_what_own_layers_cannot_do_is_refused_by_name(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    random_model(config_of("olmo3"), torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **changes)
