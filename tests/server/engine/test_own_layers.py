"""Softcap, learned sinks and experts, in fused layers and in transformers' own, under every kind of policy."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from longreach.engine.device.forward_pass import StepGraphs
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.engine.startup.load import layers_in_words
from longreach.engine.startup.start_rank import capture
from longreach.policies.masks import mask_of
from longreach.policies.parse import policy_of
from longreach.policies.values import DENSE, AttentionPolicy, Strided, Window
from longreach_kernels import Causal
from longreach_kernels import Window as WindowMask
from longreach_patches import FAMILIES, RankLayout, load_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.patches.families.configs import WINDOW, config_of, random_model
from tests.server.engine.driving import drain

COMPUTED = ("gemma2", "gpt_oss", "qwen3_moe", "olmo3", "cohere2", "gemma4_text", "gemma4_text-k_is_v", "gemma3n_text")
LENGTH = 300
POLICIES: dict[str, AttentionPolicy] = {
    "dense": DENSE,
    "window": Window(size=100, sinks=3),
    "strided": Strided(stride=256, per_head=False),
}


@pytest.fixture(scope="module", params=COMPUTED)
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
    family = str(json.loads((model_dir / "config.json").read_text())["model_type"])
    if not FAMILIES[family].fused:
        assert f"layers are transformers' own, with our attention: for the family {family}" in caplog.text
        return
    assert f"layers are fused: there are fused kernels for the family {family}" in caplog.text


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_kept_mass_is_that_of_dense_attention_and_a_learned_sink_counts_as_kept(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    # The last layer is not measured where it leaves rows out.
    config.num_hidden_layers, config.layer_types = 3, ["sliding_attention", "full_attention", "sliding_attention"]
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


@pytest.mark.parametrize("flag", ["tensor_parallel_size", "context_parallel_size"])
def test_ranks_that_cannot_share_the_heads_are_refused_by_name(tmp_path: Path, flag: str) -> None:
    random_model(config_of("olmo3"), torch.float32).save_pretrained(tmp_path)
    name = flag.replace("_", "-")
    with pytest.raises(ValueError, match=rf"^--{name}: .* 2 KV heads cannot be split over 4 ranks .* work are 1, 2$"):
        build(tmp_path, **{flag: 4})


def test_the_log_says_what_every_rank_has_whole(tmp_path: Path) -> None:
    random_model(config_of("olmo3"), torch.float32).save_pretrained(tmp_path)
    rank = load_model(str(tmp_path), device="cpu", layout=RankLayout(tensor_size=2))
    whole = 4 * 4 * (2 * 64 * 64 + 2 * 64 * 32)  # layers, bytes, queries and output, keys and values
    words = layers_in_words(rank)
    assert f"; {whole / 1024:.1f} KiB of their weights cannot be split over 2 ranks" in words
    assert "transformers' own, with our attention: norms over all heads keep fused ones from being split" in words
    one = load_model(str(tmp_path), device="cpu")
    assert "split" not in layers_in_words(one)


def test_a_fused_family_that_cannot_be_cut_is_computed_by_its_own_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(config_of("llama"), torch.float32).save_pretrained(tmp_path)
    half = RankLayout(tensor_size=2)
    assert load_model(str(tmp_path), device="cpu", layout=half).patched.fused
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", {})
    rank = load_model(str(tmp_path), device="cpu", layout=half)
    assert not rank.patched.fused
    assert "with our attention: projections that cannot be cut keep fused ones from being split" in layers_in_words(
        rank
    )


def test_layers_that_no_graph_holds_are_launched_and_the_log_says_what_that_takes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launched: list[int] = []
    steps = [((size, 64), lambda size=size: (launched.append(size), time.sleep(0.01))) for size in (8, 1)]
    graphs = StepGraphs(SimpleNamespace(steps=lambda: iter(steps)), None, None)  # type: ignore[arg-type]

    def capture_fails(_: StepGraphs) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(StepGraphs, "capture", capture_fails)
    patched = SimpleNamespace(runs_own_modules=True)
    rank = SimpleNamespace(
        on_gpu=True,
        config=SimpleNamespace(cuda_graphs=True),
        loaded=SimpleNamespace(patched=patched, config=SimpleNamespace(model_type="mixtral")),
        graphs=lambda *_: graphs,
    )
    assert capture(rank, None, None, None) is None  # type: ignore[arg-type]
    found = re.search(
        r"mixtral cannot be captured \(operation .* capturing\); .* one, which takes ([\d.]+) ms", caplog.text
    )
    assert found is not None
    assert 10 <= float(found[1]) < 1000
    assert set(launched) == {1}
    patched.runs_own_modules = False
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(rank, None, None, None)  # type: ignore[arg-type]
