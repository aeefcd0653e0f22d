"""A decode budget in the engine: what an answer reads, that bounds are there whenever pages are, and what is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from longreach.config import EMBEDDED_MODEL
from longreach.engine.device.policies import mass_samples as kept_mass
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.prefix_cache import PrefixCache
from longreach.engine.messages import EngineConfig, Failed, Generate
from longreach.engine.startup.build import build_engine
from longreach.engine.updates import DecodeUse
from longreach.policies.parse import policy_of
from longreach.policies.values import DENSE, SparseDecode
from longreach_kernels import PagedBatch
from longreach_kernels.sizes import KEY_BLOCK
from longreach_patches import policy_step

from tests.server.engine.conftest import ids, save_model
from tests.server.engine.driving import drain
from tests.server.engine.test_policies import build as build_small
from tests.server.engine.test_policies import spec

LENGTH = 1000
PAGE_BYTES = 128 * 2 * 2 * 2 * 16 * 4 + 8 * 2 * 2 * 16 * 4  # of two layers, and the bounds of one
BARE = policy_of("dynamic").resolve()


def budget(tokens: int) -> Any:
    return policy_of(f"dynamic:0.95:{tokens}").resolve()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192, sliding_window=200)


def build(model_dir: Path, **changes: Any) -> Engine:
    settings = {"page_size": 128, "kv_cache_bytes": 1 << 25, "max_batched_tokens": 2048, "page_bounds": True}
    return build_small(model_dir, **(settings | changes))


def run(engine: Engine, *requests: Generate) -> tuple[dict[str, list[int]], dict[str, DecodeUse | None]]:
    for one in requests:
        assert engine.submit(one) is None
    tokens, updates, failures = drain(engine)
    assert not failures
    assert_bounds(engine)
    return tokens, {name: news[-1].decode for name, news in updates.items()}


def _full_pages(cache: PrefixCache) -> list[int]:
    """Cached pages of the first group of layers, those that see everything; other groups' keys have a byte more."""
    return sorted(page for page, digest in cache._digest_of.items() if len(digest) == 32)


def assert_bounds(engine: Engine) -> None:
    """Of every page that somebody may take over, the bounds are the least and the greatest of its keys."""
    pages, cache = engine._runner._computing.pages, engine.scheduler.allocator._pool.cache  # type: ignore[attr-defined]
    [layer] = pages.shape.bounded
    named = _full_pages(cache)
    blocks = pages.keys[layer][named].float().unflatten(1, (-1, KEY_BLOCK))
    expected = torch.stack([blocks.amin(2), blocks.amax(2)], 3)
    assert torch.equal(pages.bounds[layer][named].float(), expected)


def alike(one: DecodeUse | None, other: DecodeUse | None) -> bool:
    assert one is not None
    assert other is not None
    numbers = [
        (use.missed_mean, use.missed_max, use.kept_mean, use.kept_least, use.queries, use.keys, use.keys_read)
        for use in (one, other)
    ]
    return one.sampled == other.sampled and numbers[0] == pytest.approx(numbers[1], abs=1e-4)


def test_steps_that_choose_keys_are_not_captured_as_dense_ones(model_dir: Path) -> None:
    policies: Any = build(model_dir)._policies
    lens, table = torch.tensor([5, 7], dtype=torch.int32), torch.zeros((2, 1), dtype=torch.int32)
    batch = PagedBatch(torch.arange(3, dtype=torch.int32), lens, table, max_seqlen_q=1, max_context_len=7)
    dense, chosen = policies.answers(DENSE, 4, batch), policies.answers(SparseDecode(64), 4, batch, measured=True)
    assert (dense.start, dense.end, dense.budget, dense.sample) == (4, 6, None, None)
    assert (chosen.budget.tokens, chosen.masks, chosen.sample.rows.tolist()) == (64, None, [0, 1])
    assert policies.answers(budget(64), 4, batch) is None


def test_a_budget_that_holds_all_keys_is_dense_attention_to_the_bit(model_dir: Path) -> None:
    found = []
    for policy in (BARE, budget(LENGTH + 40), budget(LENGTH + 20)):
        engine = build(model_dir)
        assert engine.submit(spec("a", policy, LENGTH, max_tokens=40, logprobs=5)) is None
        tokens, updates, _ = drain(engine)
        found.append((tokens["a"], [score for update in updates["a"] for score in update.logprobs]))
    assert found[1] == found[0]
    # Rounded down to 1008: from the query at that position on, which draws token 9, something is left out.
    assert [part[:9] for part in found[2]] == [part[:9] for part in found[0]]
    assert found[2][1][9:] != found[0][1][9:]


def test_what_is_read_and_saved_is_counted(model_dir: Path) -> None:
    _, uses = run(build(model_dir), spec("a", budget(128), LENGTH, max_tokens=21), spec("b", BARE, 700))
    assert uses["b"] is None
    use = uses["a"]
    assert use is not None
    lengths = range(LENGTH + 1, LENGTH + 21)  # the last token is drawn and never computed
    read = [7 * KEY_BLOCK + (length - 1) % KEY_BLOCK + 1 for length in lengths]  # seven whole blocks, and the last one
    blocks = sum(-(-length // KEY_BLOCK) for length in lengths)
    assert use.queries == 20
    assert use.keys == 2 * sum(lengths)  # of two heads in the one layer that sees everything
    assert use.keys_read == 2 * sum(read)
    assert use.kv_bytes_saved == 2 * (sum(lengths) - sum(read) - blocks) * 2 * 16 * 4
    assert use.sampled == 1
    assert 0 < use.kept_least <= use.kept_mean < 1
    assert 0 < use.missed_mean < use.missed_max <= 1


def test_nothing_is_chosen_in_layers_that_are_to_be_dense(model_dir: Path) -> None:
    deep = save_model(model_dir / "deep", max_position_embeddings=8192, num_hidden_layers=4,
                      no_rope_layers=[1, 0, 1, 0], layer_types=["sliding_attention", "full_attention"] * 2)  # fmt: skip
    engine = build(deep, attention_dense_layers=[1])
    assert engine._runner._computing.pages.shape.bounded == (3,)  # type: ignore[attr-defined]
    _, uses = run(engine, spec("a", budget(128), LENGTH))
    both = build(deep)
    assert both.submit(spec("a", budget(128), LENGTH)) is None
    everywhere = drain(both)[1]["a"][-1].decode
    assert uses["a"] is not None
    assert everywhere is not None
    assert everywhere.keys == 2 * uses["a"].keys


def test_what_an_answer_reads_does_not_depend_on_neighbours_chunks_drafts_or_delays(model_dir: Path) -> None:
    own = ids(500, seed=1) * 2
    requests = [
        spec("narrow", budget(128), prompt=own, max_tokens=40),
        spec("wide", budget(512), prompt=own, max_tokens=40),
        spec("later", budget(1024), LENGTH, max_tokens=40),
        spec("bare", BARE, LENGTH, max_tokens=40),
        spec("dense", DENSE, 700, max_tokens=40),
        spec("window", policy_of("window:100").resolve(), 600, max_tokens=40),
    ]
    alone: dict[str, list[int]] = {}
    uses: dict[str, DecodeUse | None] = {}
    for one in requests:
        tokens, told = run(build(model_dir), one)
        alone |= tokens
        uses |= told
    assert len({tuple(alone[name]) for name in ("narrow", "wide")}) == 2, "the budgets hardly differ"
    for overlaps, speculate, size in ((False, 0, 600), (True, 0, 2048), (False, 4, 700), (True, 4, 512)):
        engine = build(model_dir, max_batched_tokens=size)
        engine._runner.overlaps = overlaps
        together, told = run(engine, *(msgspec.structs.replace(one, speculate=speculate) for one in requests))
        assert together == alone
        for name in ("narrow", "wide", "later"):
            assert alike(told[name], uses[name]), name


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_second_question_goes_on_from_cached_pages_and_their_bounds(model_dir: Path, kv_dtype: str) -> None:
    first, second = (spec(name, budget(128), LENGTH, max_tokens=30) for name in "ab")
    longer = msgspec.structs.replace(second, request_id="c", prompt=[*second.prompt, *ids(200, seed=3)])
    plain = build(model_dir, prefix_cache=False, kv_cache_dtype=kv_dtype)
    expected, _ = run(plain, first)
    expected |= run(plain, longer)[0]
    engine = build(model_dir, kv_cache_dtype=kv_dtype)
    tokens, _ = run(engine, first)
    assert tokens["a"] == expected["a"]
    assert engine.submit(second) is None
    assert engine.submit(longer) is None
    tokens, updates, _ = drain(engine)
    assert_bounds(engine)
    assert tokens == {"b": expected["a"], "c": expected["c"]}
    assert all(updates[name][-1].cached >= 768 for name in "bc")


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_preempted_answer_goes_on_as_it_was_and_counts_each_token_once(model_dir: Path, prefix_cache: bool) -> None:
    requests = [
        spec(name, budget(tokens), prompt=ids(LENGTH, seed=n), max_tokens=150)
        for n, (name, tokens) in enumerate({"below": 256, "within": 1072, "other": 256}.items())
    ]
    alone: dict[str, list[int]] = {}
    uses: dict[str, DecodeUse | None] = {}
    for one in requests:
        tokens, told = run(build(model_dir), one)
        alone |= tokens
        uses |= told
    # Room for two: the third, which is urgent, preempts one that has written most of its answer.
    engine = build(model_dir, kv_cache_bytes=19 * PAGE_BYTES, prefix_cache=prefix_cache, max_batched_tokens=600)
    for one in requests[:2]:
        assert engine.submit(msgspec.structs.replace(one, flexible=True)) is None
    started = [*engine.scheduler.waiting.values()]
    while min(request.generated for request in started) <= 100:
        engine.step()
    told = run(engine, requests[2])[1]
    for request in started:
        assert request.tokens[request.prompt_tokens :] == alone[request.id]
    assert any(request.preempted for request in started), "there was room for all"
    for name, use in uses.items():
        assert alike(told[name], use), name


def test_bounds_are_evicted_and_restored_with_their_pages(model_dir: Path) -> None:
    requests = [spec(name, budget(128), prompt=ids(LENGTH, seed=n), max_tokens=20) for n, name in enumerate("ab")]
    expected = {name: tokens for one in requests for name, tokens in run(build(model_dir), one)[0].items()}
    engine = build(model_dir, kv_cache_bytes=9 * PAGE_BYTES, kv_offload_bytes=40 * PAGE_BYTES)
    for _ in range(2):
        for one in requests:
            tokens, _ = run(engine, one)
            assert tokens == {one.request_id: expected[one.request_id]}
    assert engine.stats.restored_pages >= 7


def test_no_more_is_missed_than_is_told(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_mass, "_EVERY", 1)
    bounds, kept = [], []
    collect = kept_mass.StepSamples.collect

    def look(self: Any, measured: Any) -> None:
        for group in measured:
            if group.missed is not None:
                bounds.append(group.missed)
                kept.append(group.kept.transpose(0, 1))
        collect(self, measured)

    monkeypatch.setattr(kept_mass.StepSamples, "collect", look)
    _, uses = run(build(model_dir), spec("a", budget(512), LENGTH, max_tokens=40))
    bound, missed = torch.cat(bounds, 1), 1 - torch.cat(kept, 1)
    assert bound.shape == (1, 39, 4)  # layers, tokens, heads
    assert (missed <= bound + 1e-5).all()
    assert missed.max() > 0.01, "something is missed"
    assert bound.min() < 0.9, "the bounds say something"
    use = uses["a"]
    assert use is not None
    assert use.sampled == 39
    assert use.missed_mean == pytest.approx(bound.mean().item(), abs=1e-6)
    assert use.missed_max == pytest.approx(bound.max().item(), abs=1e-6)
    assert use.kept_mean == pytest.approx(1 - missed.mean().item(), abs=1e-5)
    assert use.kept_least == pytest.approx(1 - missed.max().item(), abs=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_bounds_are_there_and_a_budget_that_holds_all_keys_is_dense_to_the_bit() -> None:
    """With the embedded model, whose answers below the budget run as CUDA graphs."""
    prompt = ids(1000, seed=2)
    found = []
    for policy in (BARE, budget(1040), budget(1008), budget(128)):
        engine, started = build_engine(EngineConfig(
            model=str(EMBEDDED_MODEL), device="cuda", page_bounds=True, max_model_len=4096, kv_cache_bytes=1 << 28
        ))  # fmt: skip
        assert started.page_bounds
        assert engine._runner.overlaps
        assert engine.submit(spec("a", policy, prompt=prompt, max_tokens=40, logprobs=5)) is None
        tokens, updates, failures = drain(engine)
        assert not failures
        pages, cache = engine._runner._computing.pages, engine.scheduler.allocator._pool.cache  # type: ignore[attr-defined]
        assert len(_full_pages(cache)) == 8, "the page that the answer filled is among them"
        for layer in pages.shape.bounded:
            named = _full_pages(cache)
            blocks = pages.keys[layer][named].float().unflatten(1, (-1, KEY_BLOCK))
            assert torch.equal(pages.bounds[layer][named].float(), torch.stack([blocks.amin(2), blocks.amax(2)], 3))
        scores = [score for update in updates["a"] for score in update.logprobs]
        found.append((tokens["a"], scores, updates["a"][-1].decode))
    dense, whole, late, narrow = found
    assert whole[:2] == dense[:2]
    assert late[1][:9] == dense[1][:9]
    assert late[1][9:] != dense[1][9:]
    assert [use.queries for _, _, use in found[1:]] == [0, 31, 39]
    assert 1 - narrow[2].missed_max - 1e-3 <= narrow[2].kept_least <= narrow[2].kept_mean < 1


def test_many_tokens_are_chosen_for_in_parts(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [spec(f"r{n}", budget(128), prompt=ids(400 + n, seed=n), max_tokens=12) for n in range(5)]
    whole, uses = run(build(model_dir), *requests)
    monkeypatch.setattr(policy_step, "SELECTION_BYTES", 2 * 24 * 4 * -(-420 // KEY_BLOCK))  # for about two tokens
    parts, told = run(build(model_dir), *requests)
    assert parts == whole
    assert all(alike(told[name], use) for name, use in uses.items())


def test_the_portable_kernels_choose_alike(model_dir: Path) -> None:
    """In Triton's interpreter, or on a GPU if there is one."""
    one = spec("a", budget(48), 90, max_tokens=3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig(model=str(model_dir), device=device, attention_backend="triton", page_bounds=True,
                          kv_cache_bytes=1 << 22, max_batched_tokens=512, dtype="float32")  # fmt: skip
    expected, uses = run(build(model_dir), one)
    tokens, told = run(build_engine(config)[0], one)
    assert tokens == expected
    assert alike(told["a"], uses["a"])


def test_work_that_is_left_out_is_not_predicted_or_counted(model_dir: Path) -> None:
    engine = build(model_dir)
    plans = []
    launch = engine._runner.launch
    engine._runner.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore[method-assign]
    run(engine, spec("a", budget(128), LENGTH, max_tokens=2))
    before = engine.stats.computed_pairs
    [answer] = [plan for plan in plans if plan.chunks[0].start >= LENGTH]
    assert answer.work.keys == 1 + 128 + round(LENGTH / 16)
    run(engine, spec("b", budget(128), LENGTH, max_tokens=3))
    # The last tile of the prompt again, and tokens at 1000 and 1001: 121 and 122 keys, or the window's 200.
    prompt = sum(position + 1 for position in range(896, LENGTH)) + 104 * 200
    assert engine.stats.computed_pairs - before == prompt + (121 + 200) + (122 + 200)


def test_a_budget_without_bounds_ends_the_request(model_dir: Path) -> None:
    failed = build(model_dir, page_bounds=False).submit(spec("a", budget(128), LENGTH))
    assert isinstance(failed, Failed)
    assert (failed.kind, "--page-bounds" in failed.message) == ("invalid", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dense_layers": [1]}, "--page-bounds: no layer of this model has keys to choose from"),
        ({"tensor_parallel_size": 2}, "--page-bounds is for one GPU; leave it out, or --tensor-parallel-size"),
        ({"context_parallel_size": 2}, "--page-bounds is for one GPU; leave it out, or --context-parallel-size"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused_at_the_start(
    model_dir: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(model_dir, **changes)
