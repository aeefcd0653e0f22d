"""The steps that are run before there are requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from longreach.engine.scheduling.limits import Limits
from longreach.engine.startup import warmup as module
from longreach_patches import KVPages, PagedStep, PageShape, load_model

from tests.patches.families.configs import config_of, random_model


@pytest.mark.parametrize("max_model_len", [20, 700])
def test_warming_up_computes_every_kind_of_step_and_writes_nothing(
    model_dir: Path, max_model_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(model_dir), device="cpu", dtype="float32")
    pages = KVPages(PageShape.of(loaded.config, loaded.dtype, 16), 50, loaded.device)
    for tensor in (*pages.keys, *pages.values):
        tensor.fill_(0.5)
    steps: list[tuple[int, int]] = []
    forward = module.forward

    def spy(loaded, step: PagedStep, *tensors: torch.Tensor) -> torch.Tensor:
        logits = forward(loaded, step, *tensors)
        assert logits.isfinite().all()
        assert logits.shape[0] == 2
        steps.append((step.batch.max_seqlen_q, step.batch.max_context_len))
        return logits

    monkeypatch.setattr(module, "forward", spy)
    module.warm(loaded, pages, Limits(8, 512, max_model_len, 0.05, 60.0))
    assert steps == ([(16, 16), (20, 20), (20, 20)] if max_model_len == 20 else [(16, 16), (256, 256), (256, 700)])
    for tensor in (*pages.keys, *pages.values):
        assert (tensor == 0.5).all()


def test_experts_are_warmed_up_with_every_number_of_tokens_that_has_a_kernel_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(config_of("mixtral"), torch.float32).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32")
    pages = KVPages(PageShape.of(loaded.config, loaded.dtype, 16), 50, loaded.device)
    sizes: list[int] = []
    forward = module.forward

    def spy(loaded, step: PagedStep, ids: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        sizes.append(len(ids))
        return forward(loaded, step, ids, *tensors)

    monkeypatch.setattr(module, "forward", spy)
    module.warm(loaded, pages, Limits(8, 512, 700, 0.05, 60.0))
    assert {min(tokens, 512) for tokens in loaded.patched.expert_steps} <= set(sizes)


def test_where_pages_have_bounds_answers_choose_their_keys_before_anybody_waits_for_that(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(model_dir), device="cpu", dtype="float32")
    pages = KVPages(PageShape.of(loaded.config, loaded.dtype, 16, bounded=(1,)), 50, loaded.device)
    for tensor in (*pages.keys, *pages.values, *(x for x in pages.bounds if x is not None)):
        tensor.fill_(0.5)
    chosen: list[tuple[int, list[tuple[int, ...]]]] = []
    forward = module.forward

    def spy(loaded, step: PagedStep, *tensors: torch.Tensor) -> torch.Tensor:
        logits = forward(loaded, step, *tensors)
        assert logits.isfinite().all()
        for group, measured in zip(step.groups, step.measured(), strict=True):
            assert measured.missed is not None
            chosen.append((group.batch.max_context_len, [tuple(x.shape) for x in measured.missed]))
        return logits

    monkeypatch.setattr(module, "forward", spy)
    module.warm(loaded, pages, Limits(8, 512, 700, 0.05, 60.0))
    assert chosen == [(700, [(1, 4)]), (700, [(2, 4)])]
    for tensor in (*pages.keys, *pages.values, *(x for x in pages.bounds if x is not None)):
        assert (tensor == 0.5).all()
