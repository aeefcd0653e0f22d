"""SmolLM2-135M, whose weights are real: the server chats, and computes what transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from longreach.policies.schemas import SCHEMAS
from longreach.text.tokenizer import Tokenizer
from longreach_patches import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pairwise import daily
from tests.patches.families.test_families import ANSWER, greedy_over_pages
from tests.server.load.process import ServerProcess

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France?"
CHUNKS = (128, 1, 99, 17, 63)
LICENSE = (ROOT / "LICENSE").read_text()
# 346, 560 and some 1,500 tokens. Of the second the static policies below do not see all, of the third `dynamic`, which
# always reads the first tile and two stretches of 512 tokens.
SHORT, MIDDLE, LONG = (LICENSE[1500:end] for end in (3300, 4400, 9200))
NARROW: list[dict[str, Any]] = [
    {"policy": "window", "size": 96, "sinks": 4},
    {"policy": "strided", "stride": 256, "per_head": False},
    {"policy": "local_global", "window": 128, "global_tokens": 128},
    {"policy": "bigbird", "window": 128, "global_tokens": 128, "random_blocks": 1},
    {"policy": "vertical_slash", "verticals": [0], "slashes": [0, 128]},
    {"policy": "dynamic", "recall": 0.5, "dense_below": 0, "decode_budget": 128},
]
# The same policies, so wide that nothing is left out.
WIDE: list[dict[str, Any]] = [
    {"policy": "window", "size": 2048},
    {"policy": "strided", "stride": 2048, "per_head": False},
    {"policy": "local_global", "window": 2048},
    {"policy": "bigbird", "window": 2048},
    {"policy": "vertical_slash", "slashes": [*range(0, 2048, 64)]},
    {"policy": "dynamic", "recall": 1.0, "dense_below": 0, "decode_budget": 2048},
]


@pytest.fixture(scope="module")
def server(smollm2_dir: Path) -> Iterator[ServerProcess]:
    """A server with the model; answers are dense unless a request says otherwise."""
    options = ("--device", "cpu", "--max-model-len", "2048", "--served-model-name", "smollm2", "--page-bounds")
    with ServerProcess(str(smollm2_dir), *options) as started:
        started.until_ready()
        yield started


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's client of it."""
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


@pytest.fixture(scope="module")
def eager(smollm2_dir: Path) -> Any:
    """transformers' own, in fp32."""
    return AutoModelForCausalLM.from_pretrained(smollm2_dir, attn_implementation="eager", dtype=torch.float32).eval()


def ask(client: openai.OpenAI, content: str, tokens: int = 32, **more: Any) -> Any:
    """A ChatCompletion, with fields of our own."""
    return client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_completion_tokens=tokens,
        extra_body=more,
    )


def test_a_chat_ends_by_itself_with_transformers_words(client: openai.OpenAI, eager: Any, smollm2_dir: Path) -> None:
    answer = ask(client, QUESTION)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert "Paris" in choice.message.content
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = eager.generate(**chat, max_new_tokens=32, do_sample=False, pad_token_id=0)[0][len(chat["input_ids"][0]) :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == choice.message.content
    assert answer.usage.prompt_tokens == len(chat["input_ids"][0])
    assert answer.usage.completion_tokens == len(tokens)


@torch.no_grad()
def test_logits_and_tokens_are_transformers(eager: Any, smollm2_dir: Path) -> None:
    ids = Tokenizer.load(str(smollm2_dir)).encode_here(LICENSE)
    assert ids == AutoTokenizer.from_pretrained(smollm2_dir)(LICENSE)["input_ids"]
    prompt = torch.tensor(ids[: sum(CHUNKS)])
    expected = eager(prompt[None], use_cache=False).logits[0]
    answer = eager.generate(prompt[None], max_new_tokens=ANSWER, do_sample=False, pad_token_id=0)[0][len(prompt) :]
    loaded = load_model(str(smollm2_dir), device="cpu", dtype="float32")
    got, own_answer = greedy_over_pages(loaded.patched.model, prompt, CHUNKS)
    assert (got - expected).abs().max() / expected.abs().max() < 1e-5
    assert own_answer == answer.tolist()


def test_every_policy_is_here() -> None:
    names = {kind.name() for kind in SCHEMAS} - {"dense", "a_shape"}  # which is a window under another name
    assert {policy["policy"] for policy in NARROW} == {policy["policy"] for policy in WIDE} == names


@pytest.mark.parametrize("policy", [*daily(NARROW[:-1], 2), NARROW[-1]], ids=lambda policy: policy["policy"])
def test_a_policy_leaves_keys_out_and_answers(client: openai.OpenAI, policy: dict[str, Any]) -> None:
    document = LONG if policy["policy"] == "dynamic" else MIDDLE
    answer = ask(client, f"{document}\n\n{QUESTION}", 8, attention=policy)
    told = answer.usage.model_extra["attention"]
    assert told["policy"] == policy["policy"]
    assert told["density"] < 1
    [choice] = answer.choices
    assert choice.message.content.strip()
    assert choice.finish_reason in ("stop", "length")


def test_policies_that_leave_nothing_out_answer_as_dense_attention(client: openai.OpenAI) -> None:
    wide: dict[str, str] = {}
    for policy in [{"policy": "dense"}, *daily(WIDE[:-1], 2), WIDE[-1]]:
        answer = ask(client, f"{SHORT}\n\n{QUESTION}", 16, attention=policy)
        told = answer.usage.model_extra.get("attention", {"density": 1})  # nothing is told of dense attention
        assert told["density"] == 1
        wide[policy["policy"]] = answer.choices[0].message.content
    assert set(wide.values()) == {wide["dense"]}
