"""Requests with rotary frequencies of their own: in one step, from the cache, after a preemption, on several ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from longreach.engine.engine import Engine
from longreach.engine.messages import Generate
from longreach.engine.rope_choice import RopeTable, chosen, contents_key, factor_for, within
from longreach.policies.values import DENSE, Window
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.server.engine.conftest import CONFIG, ids
from tests.server.engine.driving import build, drain, spec

FACTORS = (1.0, 2.0, 4.0)
TABLES = [RopeTable(1.0, 64), RopeTable(2.0, 128), RopeTable(4.0, 256)]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PROMPT = ids(40, seed=7)


@pytest.fixture(scope="module")
def yarn_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with YaRN of factor 4, whose attention is far from uniform."""
    same = {name: getattr(CONFIG, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = Qwen3Config(
        **same, **heads, **ends, max_position_embeddings=256, rope_parameters=YARN, tie_word_embeddings=False
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 else parameter + noise)
    model.save_pretrained(path := tmp_path_factory.mktemp("yarn"))
    return path


def asked(factor: float, name: str = "", prompt: list[int] = PROMPT, **more: object) -> Generate:
    return spec(name or f"x{factor:g}", prompt, rope_factor=factor, **more)


def answers(engine: Engine, *specs: Generate) -> dict[str, list[int]]:
    assert [engine.submit(one) for one in specs] == [None] * len(specs)
    tokens, _, failures = drain(engine)
    assert not failures
    return tokens


@pytest.fixture(scope="module")
def expected(yarn_dir: Path) -> dict[float, list[int]]:
    """What servers with one set of frequencies answer."""
    found = {}
    for factor in FACTORS:
        rope = {"rope_type": "default"} if factor == 1 else YARN | {"factor": factor}
        engine, _ = build(yarn_dir, hf_overrides={"rope_parameters": rope}, max_model_len=64)
        found[factor] = answers(engine, asked(0.0, "one"))["one"]
        engine.close()
    assert len({tuple(tokens) for tokens in found.values()}) == 3, "the tables give different answers"
    return found


_FULL = pytest.mark.skipif(os.environ.get("LONGREACH_TEST_FULL") != "1", reason="LONGREACH_TEST_FULL is not 1")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"context_parallel_size": 2}, marks=_FULL),
        pytest.param({"tensor_parallel_size": 2}, marks=_FULL),
    ],
    ids=str,
)
def test_requests_of_one_step_have_their_own_tables(
    yarn_dir: Path, expected: dict[float, list[int]], settings: dict[str, object]
) -> None:
    engine, started = build(yarn_dir, rope_by_request=True, **settings)
    try:
        assert started.rope_tables == TABLES
        got = answers(engine, *(asked(factor, speculate=2 * (factor == 2)) for factor in FACTORS))
        assert got == {f"x{factor:g}": tokens for factor, tokens in expected.items()}
    finally:
        engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_graphs_take_the_table_of_each_request(yarn_dir: Path, batch_invariant: bool) -> None:
    """Captured once, replayed with other tables: decodes, and prompts beside answers."""
    own: dict[str, list[int]] = {}
    settings = {"device": "cuda", "rope_by_request": True, "dtype": "float32", "batch_invariant": batch_invariant}
    engine, _ = build(yarn_dir, prefix_cache=False, **settings)
    for factor in FACTORS:
        own |= answers(engine, asked(factor, max_tokens=16))
    assert answers(engine, *(asked(factor, max_tokens=16) for factor in FACTORS)) == own
    engine.close()
    plain, _ = build(yarn_dir, prefix_cache=False, cuda_graphs=False, **settings)
    assert answers(plain, *(asked(factor, max_tokens=16) for factor in FACTORS)) == own
    plain.close()


def test_pages_are_shared_within_a_table_alone(yarn_dir: Path, expected: dict[float, list[int]]) -> None:
    engine, _ = build(yarn_dir, rope_by_request=True)
    for turn, cached in enumerate((0, 32)):  # two of three pages are full
        for factor in FACTORS:
            assert engine.submit(asked(factor, f"{turn}-{factor}")) is None
            tokens, updates, _ = drain(engine)
            assert tokens[f"{turn}-{factor}"] == expected[factor]
            assert updates[f"{turn}-{factor}"][-1].cached == cached
    engine.close()


def test_a_preempted_request_and_one_from_host_memory_keep_their_table(
    yarn_dir: Path, expected: dict[float, list[int]]
) -> None:
    page = 2 * 2 * 2 * 16 * 16 * 4  # keys and values of 2 layers of 2 heads of 16 channels, 16 tokens
    engine, _ = build(yarn_dir, rope_by_request=True, kv_cache_bytes=9 * page, kv_offload_bytes=1 << 20)
    engine.scheduler.limits = replace(engine.scheduler.limits, promised_tokens=1)
    for turn in range(2):
        specs = [asked(factor, f"{turn}-{factor}") for factor in FACTORS]
        got = answers(engine, *specs)
        assert got == {f"{turn}-{factor}": tokens for factor, tokens in expected.items()}
    assert engine.scheduler.preemptions > 0
    assert engine.stats.restored_pages > 0
    engine.close()


def test_a_factor_that_is_not_there_is_refused(yarn_dir: Path) -> None:
    for by_request, factor in ((True, 0.0), (True, 3.0), (False, 2.0)):
        engine, _ = build(yarn_dir, rope_by_request=by_request)
        failed = engine.submit(asked(factor))
        assert failed is not None
        assert failed.kind == "invalid"
        engine.close()


def test_names_of_pages_part_by_table_and_stay_where_there_is_one() -> None:
    assert contents_key(DENSE, 0.0) == DENSE.key
    keys = {contents_key(policy, factor) for policy in (DENSE, Window(9)) for factor in (0.0, *FACTORS, 4.5)}
    assert len(keys) == 10


@pytest.mark.parametrize(
    ("prompt", "answer", "factor"),
    [(48, None, 1), (49, None, 2), (48, 16, 1), (48, 17, 2), (20, 44, 1), (20, 45, 2), (128, 1, 4), (250, 6, 4)],
)
def test_the_table_is_that_of_the_longest_length(prompt: int, answer: int | None, factor: float) -> None:
    assert chosen(TABLES, prompt, answer).factor == factor
    assert factor_for(TABLES, prompt, answer) == factor


def test_a_document_and_short_questions_about_it_have_one_table() -> None:
    """Also where answers are of different lengths, up to a quarter of the native one; but for those at a border."""
    for document in range(1, 200):
        tables = {factor_for(TABLES, document + 2, answer) for answer in (None, 1, 8, 16)}
        assert len(tables) == 1
        assert tables == {factor_for(TABLES, document)} or factor_for(TABLES, document + 2) != factor_for(
            TABLES, document
        )


def test_tables_beyond_what_fits_are_not_told() -> None:
    assert within(TABLES, 100) == [RopeTable(1.0, 64), RopeTable(2.0, 100)]
    assert within(TABLES, 40) == [RopeTable(1.0, 40)]
    assert factor_for([], 5) == 0.0
