"""The model of step time: it finds the costs that made the measurements, forgets nothing it still needs, and fits."""

from __future__ import annotations

import random

import pytest
from longreach.engine.cost_model import StepCost, StepTime, Work
from longreach.policies.masks import mask_of
from longreach.policies.parse import policy_of
from longreach_kernels import Window
from longreach_kernels.masks.tile_counts import tile_count

# About what an 8B model costs on one H200: 5 ms a step, 24 us a token, 0.9 ns a pair, 31 ns a cached key.
GPU = StepCost(5e-3, 24e-6, 0.9e-9, 31e-9)
DECODES = Work.of_step([(30_000 + i, 1, None) for i in range(8)])


def prefill(start: int, length: int) -> Work:
    return Work.of_step([(start, length, None)])


def test_work_counts_what_causal_attention_computes() -> None:
    assert Work.of_chunk(3, 4) == Work(0, 4, 4 + 5 + 6 + 7, 7)
    assert Work.of_step([(0, 2, None), (9, 1, None)]) == Work(1, 3, 1 + 2 + 10, 12)


@pytest.mark.parametrize("true", [GPU, StepCost(8e-3, 5e-4, 4e-8, 1e-7), StepCost(0.0, 1e-3, 0.0, 0.0)])
def test_predictions_come_within_a_few_percent_of_noisy_measurements(true: StepCost) -> None:
    noise, model = random.Random(0), StepTime()
    for start in range(0, 131_072, 8192):
        for work in (prefill(start, 8192), Work.of_step([(start, 1, None)]), DECODES + prefill(start, 900)):
            model.observe(work, true.seconds(work) * noise.uniform(0.97, 1.03))
    for work in (prefill(100_000, 4096), Work.of_step([(60_000, 1, None)]), prefill(0, 300)):
        assert model.cost.seconds(work) == pytest.approx(true.seconds(work), rel=0.1)
    assert all(value >= 0 for value in (model.cost.per_step, model.cost.per_token, model.cost.per_pair))


def test_an_hour_of_decodes_does_not_erase_what_a_prefill_costs() -> None:
    model = StepTime()
    for start in range(0, 131_072, 8192):
        model.observe(prefill(start, 8192), GPU.seconds(prefill(start, 8192)))
    for _ in range(20_000):
        model.observe(DECODES, GPU.seconds(DECODES))
    work = DECODES + prefill(64_000, 2000)
    assert model.cost.seconds(work) == pytest.approx(GPU.seconds(work), rel=0.2)


def test_it_follows_a_machine_that_gets_slower() -> None:
    model = StepTime()
    for factor in (1.0, 3.0):
        for _ in range(300):
            model.observe(prefill(50_000, 1024), factor * GPU.seconds(prefill(50_000, 1024)))
    assert model.cost.seconds(prefill(50_000, 1024)) == pytest.approx(3 * GPU.seconds(prefill(50_000, 1024)), rel=0.05)


def test_one_step_that_waited_for_a_compiler_does_not_count_for_much() -> None:
    model = StepTime()
    model.observe(prefill(0, 1024), 60.0)
    for start in range(0, 20_480, 1024):
        model.observe(prefill(start, 1024), GPU.seconds(prefill(start, 1024)))
    assert model.cost.seconds(prefill(8192, 1024)) == pytest.approx(GPU.seconds(prefill(8192, 1024)), rel=0.05)


def test_steps_measured_together_teach_the_same() -> None:
    model = StepTime()
    for start in range(0, 262_144, 16_384):
        both = prefill(start, 8192) + prefill(start + 8192, 8192)
        model.observe(both, GPU.seconds(both))
        model.observe(DECODES, GPU.seconds(DECODES))
    assert model.cost.seconds(prefill(65_536, 8192)) == pytest.approx(GPU.seconds(prefill(65_536, 8192)), rel=0.05)


def test_what_teaches_nothing_changes_nothing() -> None:
    model = StepTime()
    model.observe(prefill(0, 10), 0.0)
    model.observe(Work(), 1.0)
    assert model.cost == StepCost()


def test_the_longest_chunk_is_the_longest() -> None:
    for seconds in (0.0, 1e-4, 0.01, 0.05):
        length = GPU.longest_chunk(100_000, 8192, seconds)
        assert GPU.seconds(Work.of_chunk(100_000, length)) <= seconds or length == 0
        assert length == 8192 or GPU.seconds(Work.of_chunk(100_000, length + 1)) > seconds
    assert GPU.longest_chunk(0, 8192, 1e9) == 8192


def test_a_whole_prefill_is_predicted_as_its_steps_are() -> None:
    steps = sum(GPU.seconds(prefill(start, 8192)) for start in range(0, 131_072, 8192))
    assert GPU.prefill_seconds(0, 131_072, 8192) == pytest.approx(steps, rel=0.01)
    assert GPU.prefill_seconds(0, 131_072, 8192) == pytest.approx(
        GPU.prefill_seconds(0, 65_536, 8192) + GPU.prefill_seconds(65_536, 131_072, 8192)
    )


def test_what_is_visible_is_what_a_policy_s_mask_lets_a_query_see() -> None:
    asked = ("window:3000:50", "a_shape", "strided:1024", "strided:512:true", "local_global", "bigbird")
    for text in asked:
        policy = policy_of(text).resolve()
        visible, mask = policy.visible(), mask_of(policy)
        for start, end in ((0, 2000), (0, 60_000), (50_000, 52_000)):
            exact = tile_count(mask, start, end).pairs / mask.heads
            assert visible.pairs(start, end) == pytest.approx(exact, rel=0.15), text
        exact = tile_count(mask, 39_999, 40_000).pairs / mask.heads
        assert visible.keys(40_000) == pytest.approx(exact, rel=0.15), text


def test_layers_that_stay_dense_count_in_what_is_visible() -> None:
    window = policy_of("window:1000:0").resolve()
    assert policy_of("dense").resolve().visible().beside_dense(0.0) is None
    assert window.visible().beside_dense(1.0) is None
    quarter = window.visible().beside_dense(0.25)
    assert quarter is not None
    assert quarter.pairs(0, 50_000) == pytest.approx(
        0.25 * Work.of_chunk(0, 50_000).pairs + 0.75 * tile_count(Window(1000), 0, 50_000).pairs,
        rel=0.01,
    )


def test_the_queries_that_a_dynamic_policy_leaves_alone_count_as_dense() -> None:
    visible = policy_of({"policy": "dynamic", "density": 0.25, "dense_below": 8192}).resolve().visible()
    dense = Work.of_chunk(0, 8192).pairs
    assert visible.pairs(0, 8192) == dense
    assert visible.keys(8192) == 8192
    assert visible.keys(8200) == 2050
    beyond = 0.25 * (Work.of_chunk(0, 60_000).pairs - dense)
    assert visible.pairs(0, 60_000) == pytest.approx(dense + beyond, rel=1e-6)
    assert visible.pairs(5000, 60_000) == pytest.approx(dense + beyond - Work.of_chunk(0, 5000).pairs, rel=1e-6)


def test_what_a_policy_leaves_out_is_not_predicted() -> None:
    visible = policy_of("window:1024:0").resolve().visible()
    assert GPU.prefill_seconds(0, 131_072, 8192, visible) < 0.5 * GPU.prefill_seconds(0, 131_072, 8192)
    assert GPU.longest_chunk(100_000, 8192, 0.1, visible) > GPU.longest_chunk(100_000, 8192, 0.1)
    assert Work.of_step([(9, 4, visible)]) == Work.of_step([(9, 4, None)])
    assert Work.of_chunk(50_000, 8, visible).keys == 1024 + 8


def test_late_steps_make_cautious_at_once_and_steps_in_time_slowly_calm() -> None:
    model = StepTime()
    work = Work(1, 300, 300_000, 3000)
    predicted = model.cost.seconds(work)
    model.judge(work, 0.7 * predicted)
    assert model.caution == 1.0
    model.judge(work, 1.5 * predicted)
    assert model.caution == pytest.approx(1.5)
    model.judge(work, predicted)
    assert 1.45 < model.caution < 1.5
    for _ in range(100):
        model.judge(work, 0.9 * predicted)
    assert model.caution < 1.01
    model.judge(work, 50 * predicted)
    assert model.caution == 2.0


@pytest.mark.parametrize("speed", [1.0, 0.5, 40.0])
def test_short_prompts_tell_what_a_long_one_costs(speed: float) -> None:
    """As measured with an 8B model on an H200, and on machines of other speeds."""
    model = StepTime()
    true = StepCost(speed * 5e-3, speed * 2.3e-5, speed * 7e-10, speed * 2.7e-8)
    for _ in range(4):
        model.observe(prefill(0, 4096), true.seconds(prefill(0, 4096)))
        model.observe(Work.of_step([(4096, 1, None)]), true.seconds(Work.of_step([(4096, 1, None)])))
    assert model.cost.prefill_seconds(0, 32_768, 8192) == pytest.approx(true.prefill_seconds(0, 32_768, 8192), rel=0.3)
