"""Each family, loaded as the server loads it, gives what transformers' eager model gives: over pages, in chunks, and in
the tokens that follow.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from longreach_patches import FAMILIES, load_model
from longreach_patches.families import experts_per_token
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.pairwise import daily
from tests.patches.families.configs import NAMES, config_of, random_model
from tests.patches.test_pages import PagedSequences

CHUNKS = (31, 1, 13, 25)
ANSWER = 8


def greedy(model: PreTrainedModel, prompt: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt, and the tokens that follow."""
    ids, first = prompt, None
    for _ in range(ANSWER):
        logits = model(ids[None], use_cache=False).logits[0]
        first = logits if first is None else first
        ids = torch.cat([ids, logits[-1].argmax()[None]])
    assert first is not None
    return first, ids[len(prompt) :].tolist()


def greedy_over_pages(
    model: PreTrainedModel, prompt: torch.Tensor, chunks: Sequence[int] = CHUNKS
) -> tuple[torch.Tensor, list[int]]:
    """The same, with the prompt in chunks over scattered pages, then a token at a time."""
    run = PagedSequences(model, [torch.cat([prompt, torch.zeros(ANSWER, dtype=torch.long)])])
    logits = torch.cat([run.step([chunk])[0] for chunk in chunks])
    answer = [int(logits[-1].argmax())]
    while len(answer) < ANSWER:
        run.sequences[0][run.done[0]] = answer[-1]
        answer.append(int(run.step([1])[0][-1].argmax()))
    return logits, answer


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    return float((got - wanted).abs().max() / wanted.abs().max())


def most_error(eager: PreTrainedModel, prompt: torch.Tensor, expected: torch.Tensor) -> float:
    """What rounding explains. A recurrence carries each rounding on: there it is what transformers' own fp32 is off."""
    if FAMILIES[eager.config.model_type].mixer is None:
        return 1e-5
    wide = copy.deepcopy(eager).double()
    if experts_per_token(wide.config):
        wide.set_experts_implementation("eager")  # which alone computes in fp64
    return max(1e-5, 2 * relative(expected, wide(prompt[None], use_cache=False).logits[0]))


@torch.no_grad()
@pytest.mark.parametrize("name", daily(NAMES, 24))
def test_a_family_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    random_model(config, torch.float32).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32")
    assert loaded.patched.fused == FAMILIES[config.model_type].fused
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    prompt = torch.randint(5, 512, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
    expected, answer = greedy(eager, prompt)
    got, own_answer = greedy_over_pages(loaded.patched.model, prompt)
    # The engine asks for some rows' logits alone.
    assert "logits_to_keep" in inspect.signature(type(loaded.patched.model).forward).parameters
    assert relative(got, expected) < most_error(eager, prompt, expected)
    assert own_answer == answer
