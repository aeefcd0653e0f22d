"""What tokens of an answer attended to, against eager attention, however their steps come about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from longreach.engine.device.attended_blocks import observed_layers
from longreach.engine.engine import Engine
from longreach.engine.messages import Failed, Generate
from longreach.engine.updates import AttendedBlocks, Update
from longreach.policies.parse import policy_of
from transformers import AutoModelForCausalLM

from tests.server.engine import driving
from tests.server.engine.conftest import ids, save_model
from tests.server.engine.driving import drain, spec

LAYERS = ["full_attention"] * 4 + ["sliding_attention"]
PROMPT = ids(330, seed=3)
BLOCKS = (330 - 32) // 16  # the last ones of the prompt are no places, nor is the first


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_hidden_layers": 5, "layer_types": LAYERS, "no_rope_layers": [1, 0, 1, 0, 1]}
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=512, **changes)


def build(model_dir: Path, **changes: Any) -> Engine:
    return driving.build(model_dir, **({"max_batched_tokens": 128} | changes))[0]


def asking(name: str = "a", prompt: list[int] = PROMPT, **more: Any) -> Generate:
    return spec(name, prompt, **({"places": True, "max_tokens": 8} | more))


def attended(updates: list[Update]) -> list[AttendedBlocks]:
    return [told for update in updates for told in update.attended]


def exact(model_dir: Path, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """(answer, blocks) fp64, from the weights of transformers' eager attention in the upper half of the full layers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float64).eval()
    with torch.no_grad():
        weights = model(torch.tensor([prompt + answer[:-1]]), output_attentions=True, use_cache=False).attentions
    rows = torch.cat([weights[layer][0, :, len(prompt) - 1 :] for layer in (2, 3)])  # (heads, answer, keys)
    blocks = (len(prompt) - 32) // 16
    found = rows[..., : blocks * 16].unflatten(-1, (blocks, 16)).sum(-1).square().sum(0)
    found[:, 0] = 0
    return found


def check(model_dir: Path, told: list[AttendedBlocks], answer: list[int], prompt: list[int] = PROMPT) -> None:
    wanted = exact(model_dir, prompt, answer)
    assert len(told) == len(answer)
    for one, scores in zip(told, wanted, strict=True):
        assert len(one.blocks) == min(16, len(scores) - 1)
        assert set(one.blocks) <= set(range(1, len(scores)))
        best = scores.topk(len(one.blocks)).values
        torch.testing.assert_close(torch.tensor(one.scores).double(), best, rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(scores[one.blocks], best, rtol=1e-3, atol=1e-7)


def test_the_upper_half_of_the_full_layers_is_looked_at() -> None:
    assert observed_layers([]) == frozenset()
    assert observed_layers([5, 11, 17]) == {11, 17}
    assert observed_layers(range(32)) == set(range(16, 32))
    of_many = observed_layers(range(80))
    assert len(of_many) == 16
    assert min(of_many) >= 40
    assert max(of_many) == 79


def test_blocks_are_those_of_eager_attention(model_dir: Path) -> None:
    engine = build(model_dir)
    assert engine.submit(asking()) is None
    tokens, updates, _ = drain(engine)
    check(model_dir, attended(updates["a"]), tokens["a"])
    assert all(len(update.attended) == len(update.tokens) for update in updates["a"])


def test_others_beside_it_a_cached_prefix_and_drafts_change_nothing(model_dir: Path) -> None:
    """The prompt repeats itself, so that there are drafts, and some of them stand."""
    engine = build(model_dir)
    looped = ids(40, seed=5) * 8 + ids(4, seed=5)
    requests = [
        spec("plain", ids(200, seed=8)),
        asking("first", looped, max_tokens=10),
        asking("other", PROMPT[:300]),
        asking("drafted", looped, max_tokens=10, speculate=4),
    ]
    for one in requests:
        assert engine.submit(one) is None
    tokens, updates, _ = drain(engine)
    assert not attended(updates["plain"])
    check(model_dir, attended(updates["other"]), tokens["other"], PROMPT[:300])
    check(model_dir, attended(updates["first"]), tokens["first"], looped)
    check(model_dir, attended(updates["drafted"]), tokens["drafted"], looped)
    assert len(updates["drafted"]) < len(updates["first"])  # else no draft stood
    assert engine.submit(asking("again", looped, max_tokens=10)) is None
    more, news, _ = drain(engine)
    assert news["again"][-1].cached > 300
    check(model_dir, attended(news["again"]), more["again"], looped)
    alone = build(model_dir)
    assert alone.submit(spec("mute", looped, max_tokens=10)) is None
    assert drain(alone)[0]["mute"] == tokens["first"] == tokens["drafted"] == more["again"]


def test_a_short_prompt_has_no_places(model_dir: Path) -> None:
    engine = build(model_dir)
    assert engine.submit(asking(prompt=PROMPT[:47])) is None
    _, updates, _ = drain(engine)
    assert [told.blocks for told in attended(updates["a"])] == [[]] * 8


@pytest.mark.parametrize("attention", ["window:32:4", "dynamic:0.9:64"])
def test_an_answer_that_does_not_see_all_keys_is_refused(model_dir: Path, attention: str) -> None:
    engine = build(model_dir, page_bounds=True, page_size=128, max_batched_tokens=512)
    refused = engine.submit(asking(attention=policy_of(attention).resolve()))
    assert isinstance(refused, Failed)
    assert refused.message.startswith("`return_places`")
    assert engine.submit(asking(attention=policy_of("dynamic:0.9").resolve())) is None
    tokens, updates, _ = drain(engine)
    check(model_dir, attended(updates["a"]), tokens["a"])
