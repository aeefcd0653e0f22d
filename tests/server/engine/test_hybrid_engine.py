"""Small models with states in the engine: the answers of the plain model, whatever is shared, given back and redone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.build import build_engine
from longreach.engine.startup.state_demand import StateDemand
from longreach.engine.updates import LayerCount
from longreach.policies.values import Window
from longreach_kernels import Causal
from longreach_kernels import Window as WindowMask
from longreach_kernels.masks.tile_counts import tile_count
from longreach_patches import Footprint, StateShape
from transformers import AutoModelForCausalLM

from tests.pairwise import daily
from tests.patches.families.configs import config_of, random_model
from tests.server.engine.driving import build, drain, spec

PAGE = 16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# On a GPU steps overlap, and short ones replay graphs.
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


# Layers of each kind: full and state, with experts; in LFM3 windows besides.
KINDS = {"qwen3_next": (1, 0, 3), "lfm2_moe": (1, 0, 3), "granitemoehybrid": (1, 0, 3), "lfm3": (1, 1, 2)}


@pytest.fixture(scope="module", params=["qwen3_next", *daily(["granitemoehybrid", "lfm2_moe", "lfm3"], 1)])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with layers that attend and layers that keep a state."""
    path = tmp_path_factory.mktemp("hybrid")
    config = config_of(request.param)
    config.max_position_embeddings = 2048
    random_model(config, torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(model_dir: Path):
    """The greedy answer of transformers' own model to a prompt."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float32).eval()

    @torch.no_grad()
    def answer(prompt: list[int], count: int) -> list[int]:
        out = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    return answer


# What depends on the sizes of pages and states.
of_one_kind = pytest.mark.parametrize("model_dir", ["qwen3_next"], indirect=True)


def text(seed: int, length: int) -> list[int]:
    return torch.randint(5, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_question_and_a_next_turn_read_what_is_new(model_dir: Path, plain, device: str) -> None:
    how = {"device": device, "dtype": "float32"}
    engine, started = build(model_dir, max_batched_tokens=512, kv_cache_bytes=64 << 20, **how)
    assert started.state_slots > 16
    document = text(1, 1500)
    prompts = {"first": document + text(2, 9), "second": document + text(3, 20)}
    tokens: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        assert engine.submit(spec(name, prompt, max_tokens=20)) is None
        tokens, updates, failures = drain(engine)
        assert not failures
        assert tokens[name] == plain(prompt, 20)
        cached = updates[name][-1].cached
        assert cached == (0 if name == "first" else 1376), "128 tokens before the first prompt's end"
    turn = prompts["second"] + tokens["second"] + text(4, 12)
    assert engine.submit(spec("turn", turn, max_tokens=8)) is None
    tokens, updates, _ = drain(engine)
    assert tokens["turn"] == plain(turn, 8)
    assert updates["turn"][-1].cached >= len(prompts["second"]) + 20 - PAGE
    usage = engine.stats
    assert usage.state_slots == started.state_slots
    assert usage.state_copies > 1


@pytest.mark.parametrize("device", DEVICES)
def test_many_at_once_are_preempted_cancelled_and_drafted_for_and_get_the_plain_answers(
    model_dir: Path, plain, device: str
) -> None:
    sizes = build(model_dir)[1]
    page_bytes, state_bytes = sizes.page_bytes, sizes.state_bytes
    room = 24 * page_bytes + 14 * state_bytes
    engine, _ = build(
        model_dir,
        device=device,
        dtype="float32",
        max_batched_tokens=40,
        max_num_seqs=4,
        kv_cache_bytes=room,
        state_cache_bytes=6 * state_bytes,
        max_model_len=200,
    )
    repeated = text(5, 7) * 12
    prompts = {
        "flexible": text(7, 90),
        "long": text(9, 60),
        "cancelled": text(8, 100),
        "drafted": repeated,
        "alike": repeated + text(6, 5),
    }
    tokens: dict[str, list[int]] = {}

    def steps(count: int) -> None:
        for _ in range(count):
            for news in engine.step():
                for update in getattr(news, "updates", []):
                    tokens.setdefault(update.request_id, []).extend(update.tokens)
            engine.scheduler.check()

    for name, prompt in prompts.items():
        speculate = 4 if name in ("drafted", "alike") else 0
        flexible = name == "flexible"
        assert engine.submit(spec(name, prompt, max_tokens=60, speculate=speculate, flexible=flexible)) is None
        steps(6)
    engine.cancel("cancelled")
    more, _, failures = drain(engine)
    assert not failures
    for name in prompts.keys() - {"cancelled"}:
        assert tokens.get(name, []) + more.get(name, []) == plain(prompts[name], 60), name
    assert engine.scheduler.preemptions


def test_a_policy_changes_layers_that_attend_and_usage_counts_the_others(model_dir: Path) -> None:
    """A setting numbers the layers that attend, of which one sees everything and is the first."""
    kinds = KINDS[json.loads((model_dir / "config.json").read_text())["model_type"]]
    length, heads = 300, 4
    window = {"attention": Window(size=64, sinks=0), "max_tokens": 2}
    causal, seen = (tile_count(mask, 0, length).pairs for mask in (Causal(), WindowMask(64)))
    for dense_layers, changed, pairs in (([], 1, seen), ([0], 0, causal)):
        engine, _ = build(model_dir, max_batched_tokens=512, attention_dense_layers=dense_layers)
        assert engine.submit(spec("a", text(1, length), **window)) is None
        _, updates, _ = drain(engine)
        [use] = [update.attention for update in updates["a"] if update.attention is not None]
        assert use.layers == LayerCount(changed, *kinds)
        assert (use.pairs, use.dense_pairs) == (heads * pairs, heads * causal)
        assert bool(use.other_pairs) == bool(kinds[1])
        assert (use.kept_mass is not None) == bool(changed)
        assert engine.stats.causal_pairs == sum(kinds[:2]) * (causal + length + 1), "with one token of the answer"
    with pytest.raises(ValueError, match=r"counts the layers that attend, of which the model has [12]: .* no layer 2"):
        build(model_dir, attention_dense_layers=[2])


@of_one_kind
@pytest.mark.parametrize(
    ("device", "ranks"), [("cpu", 1), ("cpu", 2), pytest.param("cuda", 1, marks=[pytest.mark.gpu, needs_gpu])]
)
def test_pages_and_states_come_back_from_host_memory(model_dir: Path, plain, device: str, ranks: int) -> None:
    page_bytes = build(model_dir)[1].page_bytes
    shape = StateShape.of(config_of("qwen3_next"), torch.float32)
    assert shape is not None
    engine, started = build(
        model_dir,
        device=device,
        dtype="float32",
        max_batched_tokens=512,
        max_num_seqs=1,
        tensor_parallel_size=ranks,
        kv_cache_bytes=100 * page_bytes // ranks + 3 * shape.bytes_per_slot,
        state_cache_bytes=shape.bytes_per_slot,
        kv_offload_bytes=400 * page_bytes,
        max_model_len=1300,
    )
    try:
        assert started.host_bytes == 400 * page_bytes > started.host_kv_tokens // PAGE * page_bytes
        documents = [text(seed, 1200) for seed in (1, 2, 3)]
        for turn, document in enumerate(documents + documents[:2]):
            prompt = document + text(10 + turn, 20)
            assert engine.submit(spec("a", prompt, max_tokens=5)) is None
            tokens, updates, failures = drain(engine)
            assert not failures
            assert tokens["a"] == plain(prompt, 5)
            assert updates["a"][-1].cached == (1088 if turn > 2 else 0)
        assert engine.stats.restored_states == 2
        assert engine.stats.host_state_copies >= 2
    finally:
        engine.close()


@of_one_kind
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offload_bytes": 10000}, "--kv-offload-bytes: one page and one copy of a state take"),
        ({"state_cache_bytes": 1 << 20, "prefix_cache": False}, "leave out --no-prefix-cache"),
        ({"state_cache_bytes": 100}, "--state-cache-bytes: a copy of this model's states takes"),
        ({"state_cache_bytes": 1 << 30}, "--state-cache-bytes: .* are more than the 1.0 MiB .*; give less"),
    ],
)
def test_settings_that_do_not_go_with_states_are_refused(model_dir: Path, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(model_dir, **settings)


def test_without_memory_for_copies_there_are_none(model_dir: Path) -> None:
    engine, started = build(model_dir, state_cache_bytes=0, max_num_seqs=2)
    assert started.state_slots == 4
    for name in "ab":
        assert engine.submit(spec(name, text(1, 100), max_tokens=40)) is None
        _, updates, failures = drain(engine)
        assert not failures
        assert updates[name][-1].cached == 0
    assert engine.stats.state_copies == 0


def test_bits_that_do_not_depend_on_other_requests_are_refused() -> None:
    footprint = Footprint.of(config_of("olmo_hybrid"), torch.float32, PAGE)
    with pytest.raises(ValueError, match="--batch-invariant: bits of this model's states may depend on"):
        StateDemand.of(footprint, EngineConfig(model="m", batch_invariant=True))


def test_a_model_without_states_refuses_memory_for_them(tmp_path: Path) -> None:
    random_model(config_of("llama"), torch.float32).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_cache_bytes=1 << 22, state_cache_bytes=1 << 20)
    with pytest.raises(ValueError, match="no layer of this model keeps a recurrent state; leave it out"):
        build_engine(config)
