"""Attention by request: each gets the mask that its policy names, alone or in a crowd, however its prompt was cut."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from longreach.engine.device.policies.layer_masks import LayerPolicies
from longreach.engine.device.policies.mass_samples import sampled
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.engine.updates import LayerCount
from longreach.policies.masks import mask_of
from longreach.policies.values import DENSE, AttentionPolicy, BigBird, LocalGlobal, Strided, VerticalSlash, Window
from longreach_kernels import Causal
from longreach_kernels import Window as WindowMask
from longreach_kernels.analysis.work import work
from longreach_patches import PageShape
from transformers import AutoModelForCausalLM

from tests.server.engine.conftest import ids, save_model
from tests.server.engine.driving import drain

LENGTH = 700

SHAPE = PageShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32, page_size=16)
POLICIES = {
    "window": Window(size=100, sinks=3),
    "many sinks": Window(size=30, sinks=50),
    "strided": Strided(stride=256, per_head=False),
    "strided by head": Strided(stride=384, per_head=True),
    "local and global": LocalGlobal(window=128, global_tokens=128),
    "bigbird": BigBird(window=128, global_tokens=128, random_blocks=1, seed=3),
    "vertical-slash": VerticalSlash(verticals=(140,), slashes=(0, 300)),
}


@pytest.fixture(scope="module")
def long_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `model_dir`, for 2,048 positions, and with a window that reaches beyond a block of a policy."""
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048, sliding_window=200)


def build(model_dir: Path, **changes: object) -> Engine:
    settings = {"max_num_seqs": 16, "max_batched_tokens": 512, "page_size": 16, "kv_cache_bytes": 1 << 23}
    return build_engine(EngineConfig(model=str(model_dir), device="cpu", **(settings | changes)))[0]  # type: ignore[arg-type]


def spec(name: str, attention: AttentionPolicy, length: int = LENGTH, **more: object) -> Generate:
    how = Sampling(temperature=0.0, seed=5)
    fields = {"max_tokens": 6, "prompt": ids(length, seed=length), "sampling": how} | more
    return Generate(request_id=name, attention=attention, **fields)  # type: ignore[arg-type]


def eager_tokens(model_dir: Path, one: Generate) -> list[int]:
    """What transformers' eager attention generates under the masks, written out whole."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    mask = mask_of(one.attention)
    tokens = list(one.prompt)
    for _ in range(one.max_tokens):
        at = torch.arange(len(tokens))
        seen = mask.allowed(at, at)
        seen = seen.repeat_interleave(4 // mask.heads, 0) if mask.heads > 1 else seen[None]
        bias = {
            kind: torch.zeros(seen.shape).masked_fill(~(seen & own.allowed(at, at)), float("-inf"))[None]
            for kind, own in (("full_attention", Causal()), ("sliding_attention", WindowMask(200)))
        }
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), attention_mask=bias, use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(one.prompt) :]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_request_is_computed_under_the_masks_of_its_policy(long_model_dir: Path, policy: AttentionPolicy) -> None:
    engine = build(long_model_dir)
    one = spec("a", policy)
    assert engine.submit(one) is None
    assert drain(engine)[0]["a"] == eager_tokens(long_model_dir, one)


def test_policies_in_one_batch_get_what_each_gets_alone_however_prompts_are_cut(long_model_dir: Path) -> None:
    requests = [
        spec(f"{name} {length}", policy, length)
        for name, policy in ({"dense": DENSE} | POLICIES).items()
        for length in (LENGTH, 131)
    ]
    alone: dict[str, list[int]] = {}
    engine = build(long_model_dir, max_batched_tokens=1024, prefix_cache=False)
    for one in requests:
        engine.submit(one)
        alone |= drain(engine)[0]
    assert len({tuple(alone[f"{name} {LENGTH}"]) for name in POLICIES}) > 3, "the policies hardly differ"
    for overlaps, speculate, tokens in ((False, 0, 200), (True, 3, 77)):
        engine = build(long_model_dir, max_batched_tokens=tokens)
        engine._runner.overlaps = overlaps
        for one in requests:
            engine.submit(msgspec.structs.replace(one, speculate=speculate))
        together, _, failures = drain(engine)
        assert not failures
        assert together == alone


def test_pages_are_shared_within_a_policy_and_never_across(long_model_dir: Path) -> None:
    engine = build(long_model_dir)
    found = {}
    for turn in range(2):
        for name in ("window", "strided"):
            one = spec(f"{name} {turn}", POLICIES[name])
            assert engine.submit(one) is None
            tokens, updates, _ = drain(engine)
            found[name, turn] = tokens[one.request_id], updates[one.request_id][-1].cached
    other = Window(size=101, sinks=3)
    engine.submit(spec("other", other))
    assert drain(engine)[1]["other"][-1].cached == 0
    for name in ("window", "strided"):
        (first, none), (second, most) = found[name, 0], found[name, 1]
        assert (none, most) == (0, (LENGTH - 1) // 16 * 16)
        assert first == second
    assert found["window", 0][0] != found["strided", 0][0]


def logprobs(engine: Engine, *requests: Generate) -> dict[str, list[float]]:
    """The log-probabilities of the answers' tokens."""
    for one in requests:
        engine.submit(msgspec.structs.replace(one, logprobs=0))
    _, updates, _ = drain(engine)
    return {name: [score.logprob for update in news for score in update.logprobs] for name, news in updates.items()}


def test_dense_requests_form_no_group_and_keep_their_numbers_beside_others(long_model_dir: Path) -> None:
    # One step reads all prompts, whatever the time it takes: products are of the same heights in both runs.
    engine = build(long_model_dir, prefix_cache=False, max_batched_tokens=2048, max_itl=1000.0)
    made = []
    groups = engine._runner._computing.policies.groups  # pyright: ignore[reportAttributeAccessIssue]
    engine._runner._computing.policies.groups = lambda *args: made.append(groups(*args)) or made[-1]  # type: ignore[attr-defined]
    one = spec("a", DENSE, 400)
    alone = logprobs(engine, one)["a"]
    assert made
    assert not any(made)
    crowd = [spec(name, DENSE, 400) for name in "bcd"]
    dense = logprobs(engine, one, *crowd)
    mixed = logprobs(engine, one, *(msgspec.structs.replace(r, attention=POLICIES["strided"]) for r in crowd))
    assert any(len(steps) == 2 for steps in made)
    # Not the same bits on every processor: how many sequences a product has may change the order of its sums.
    assert mixed["a"] == pytest.approx(dense["a"], abs=1e-5)
    assert mixed["b"] != dense["b"]
    assert alone == pytest.approx(dense["a"], abs=1e-5)


def test_layers_named_as_dense_stay_as_they_are(long_model_dir: Path) -> None:
    requests = [spec("dense", DENSE), spec("window", POLICIES["window"])]
    tokens = {}
    for layers in ([], [1], [0, -1]):
        engine = build(long_model_dir, attention_dense_layers=layers)
        for one in requests:
            engine.submit(one)
        tokens[str(layers)] = drain(engine)[0]
    assert tokens["[]"]["window"] != tokens["[]"]["dense"]
    assert tokens["[1]"]["window"] != tokens["[]"]["window"]
    assert tokens["[0, -1]"]["window"] == tokens["[0, -1]"]["dense"]
    assert len({tuple(found["dense"]) for found in tokens.values()}) == 1


def test_a_layer_that_is_not_there_and_heads_that_cannot_be_told_apart_are_refused(long_model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"-dense-layers counts the layers that attend, .* 2: 0 to 1, or -2 to -1.* 2"):
        build(long_model_dir, attention_dense_layers=[2])
    policies = LayerPolicies((Causal(),), 3, SHAPE)
    policies.check(spec("a", POLICIES["strided"]))
    with pytest.raises(ValueError, match=r"`attention`: the policy strided tells 2 groups of heads apart.* 3 heads"):
        policies.check(spec("a", POLICIES["strided by head"]))


def test_a_policy_that_the_model_cannot_have_ends_the_request(long_model_dir: Path) -> None:
    engine = build(long_model_dir)
    engine._policies = LayerPolicies((Causal(),), 3, SHAPE)
    failed = engine.submit(spec("a", POLICIES["strided by head"]))
    assert isinstance(failed, Failed)
    assert failed.kind == "invalid"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_pairs_are_counted_as_they_are_computed(long_model_dir: Path, policy: AttentionPolicy) -> None:
    engine = build(long_model_dir, max_batched_tokens=200)
    engine.submit(spec("a", policy, 600, max_tokens=60))
    drain(engine)
    at = torch.arange(659)
    mask = mask_of(policy).allowed(at, at)
    own = Causal().allowed(at, at), WindowMask(200).allowed(at, at)
    heads = mask.shape[0] if mask.dim() == 3 else 1
    assert engine.stats.causal_pairs == 2 * int(own[0].sum())
    assert engine.stats.computed_pairs * heads == sum(int((mask & layer).sum()) for layer in own)


def dense_mass(model_dir: Path, one: Generate, positions: list[int]) -> torch.Tensor:
    """What the attention of fp64 eager layers, fed with the policy's own hidden states, has on the keys that are seen,
    (positions, heads), in the one layer that the policy changes."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float64).eval()
    at = torch.arange(len(one.prompt))
    mask = mask_of(one.attention).allowed(at, at)
    own = Causal().allowed(at, at)
    window = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(
        ~(mask & WindowMask(200).allowed(at, at)), -math.inf
    )
    bias = {
        "sliding_attention": window[None, None],
        "full_attention": torch.zeros(own.shape, dtype=torch.float64).masked_fill(~own, -math.inf)[None, None],
    }
    with torch.no_grad():
        weights = model(
            torch.tensor([one.prompt]), attention_mask=bias, use_cache=False, output_attentions=True
        ).attentions
    return (weights[1][0] * mask).sum(-1).T[positions]


def test_kept_mass_is_that_of_dense_attention_in_fp64(tmp_path: Path) -> None:
    """Of the layers, the policy changes the second alone: the windows of the others are within the policy's."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = {"num_hidden_layers": 3, "layer_types": kinds, "no_rope_layers": [1, 0, 1]}
    model_dir = save_model(tmp_path, max_position_embeddings=2048, sliding_window=200, **layers)
    one = spec("a", Window(size=210, sinks=3))
    found = []
    for tokens in (1024, 130):
        engine = build(model_dir, max_batched_tokens=tokens)
        engine.submit(one)
        updates = drain(engine)[1]["a"]
        [use] = [update.attention for update in updates if update.attention is not None]
        assert next(update for update in updates if update.tokens).attention is use
        found.append(use)
    positions = sampled(LENGTH, 0, LENGTH)
    assert len(positions) == 65
    exact = dense_mass(model_dir, one, positions)
    for use in found:
        assert use.kept_mass is not None
        assert use.kept_mass.queries == 65
        assert use.kept_mass.mean == pytest.approx(exact.mean().item(), abs=1e-5)
        assert use.kept_mass.p5 == pytest.approx(exact.quantile(0.05).item(), abs=1e-5)
        assert use.kept_mass.least == pytest.approx(exact.min().item(), abs=1e-5)
    assert exact.min() < 0.9


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_reported_is_the_work_of_the_masks(long_model_dir: Path, policy: AttentionPolicy) -> None:
    engine = build(long_model_dir, max_batched_tokens=300)
    engine.submit(spec("a", policy))
    use = next(update.attention for update in drain(engine)[1]["a"] if update.tokens)
    assert use is not None
    tile = {"tile_q": 128, "tile_k": 128}
    mask = mask_of(policy)
    heads = [h * mask.heads // 4 for h in range(4)]
    window = [work(WindowMask(200) & mask, LENGTH, LENGTH, 16, head=h, **tile) for h in heads]
    own = work(WindowMask(200), LENGTH, LENGTH, 16, **tile)
    # The layer with a window counts where the policy narrows it.
    narrowed = any(one.pairs < own.pairs for one in window)
    seen = [*(work(mask, LENGTH, LENGTH, 16, head=h, **tile) for h in heads), *(window if narrowed else [])]
    dense = [work(Causal(), LENGTH, LENGTH, 16, **tile)] * 4 + [own] * (4 if narrowed else 0)
    assert use.layers == LayerCount(1 + narrowed, 1, 1, 0)
    assert use.other_pairs == (0 if narrowed else 4 * own.pairs)
    assert (use.tiles, use.pairs) == (sum(w.tiles for w in seen), sum(w.pairs for w in seen))
    assert (use.dense_tiles, use.dense_pairs) == (sum(w.tiles for w in dense), sum(w.pairs for w in dense))
    skipped = use.dense_tiles - use.tiles
    assert use.flops_saved == skipped * 4 * 128 * 128 * 16
    assert use.kv_bytes_saved == skipped // 2 * 2 * 128 * 16 * 4


def test_dense_requests_report_nothing(long_model_dir: Path) -> None:
    engine = build(long_model_dir)
    engine.submit(spec("a", DENSE, 200))
    assert all(update.attention is None for update in drain(engine)[1]["a"])
