"""The whole way with the embedded model: a real engine process behind the API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import openai
import pytest
from longreach.config import EMBEDDED_MODEL_NAME

from tests.server.api.embedded import EmbeddedServer
from tests.server.attacks import sampling

PROMPT = "The keeper of the lantern walks along the river. The pass key for the silver lantern is 4071. " * 20


@pytest.fixture
def client(embedded: EmbeddedServer) -> openai.OpenAI:
    return embedded.openai


def complete(client: openai.OpenAI, **fields) -> openai.types.Completion:
    known = {"model": EMBEDDED_MODEL_NAME, "prompt": PROMPT}
    return client.completions.create(**known, extra_body=fields)


def test_an_answer_follows_its_schema_regex_or_grammar(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"key": {"type": "integer", "minimum": 10, "maximum": 99}, "what": {"enum": ["lantern", "owl"]}},
        "required": ["key", "what"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "key", "schema": schema, "strict": True}}
    for seed in range(3):
        answer = complete(client, response_format=form, max_tokens=64, seed=seed, n=2)
        for choice in answer.choices:
            found = json.loads(choice.text)
            assert found.keys() == {"key", "what"}
            assert 10 <= found["key"] <= 99
            assert choice.finish_reason == "stop"
    [choice] = complete(client, regex="[a-c]{3}-[0-9]{4}", max_tokens=32, speculate=4).choices
    assert re.fullmatch("[a-c]{3}-[0-9]{4}", choice.text)
    [choice] = complete(
        client, grammar='start: "yes " NUMBER\nNUMBER: /[1-9]{3}/', ignore_eos=True, max_tokens=32
    ).choices
    assert re.fullmatch("yes [1-9]{3}", choice.text)
    assert choice.finish_reason == "stop"


def test_a_seed_gives_the_same_bytes_alone_and_among_others(client: openai.OpenAI) -> None:
    how = {
        "max_tokens": 24,
        "temperature": 2.0,  # at 0.9 the sentence that was read twenty times comes again whatever the seed
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"300": 2},
        "ignore_eos": True,
    }
    alone = [complete(client, seed=seed, **how).choices[0].text for seed in (7, 8, 9)]
    assert [choice.text for choice in complete(client, seed=7, n=3, **how).choices] == alone
    assert [complete(client, seed=seed, speculate=4, **how).choices[0].text for seed in (7, 8, 9)] == alone
    assert len(set(alone)) == 3


@pytest.fixture
def fresh() -> Iterator[openai.OpenAI]:
    """A server whose pages lie in order: where they lie scattered, a CPU adds up in another order."""
    with EmbeddedServer(max_model_len=4096, kv_cache_memory="64MiB") as live:
        yield live.openai


def test_a_prompts_logprobs_are_the_same_when_it_is_cached(fresh: openai.OpenAI) -> None:
    client = fresh
    first, second = (
        complete(client, echo=True, logprobs=1, max_tokens=0, temperature=0).choices[0].logprobs for _ in range(2)
    )
    assert first is not None
    assert second is not None
    assert first.token_logprobs is not None
    assert second.token_logprobs is not None
    assert first.token_logprobs[0] is second.token_logprobs[0] is None
    # What is cached decides where the rest is cut into steps, and so how its sums round.
    assert first.token_logprobs[1:] == pytest.approx(second.token_logprobs[1:], rel=1e-4, abs=1e-5)
    assert all(value is not None and value <= 0 for value in first.token_logprobs[1:])
    # What has been read three times is no surprise.
    assert sum(value or 0 for value in first.token_logprobs[-50:]) / 50 > -1
    streamed = client.completions.create(
        model=EMBEDDED_MODEL_NAME, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1, stream=True
    )
    pieces = [c.logprobs.token_logprobs for chunk in streamed for c in chunk.choices if c.logprobs]
    told = [v for piece in pieces for v in piece or []][1 : len(first.token_logprobs)]
    assert told == pytest.approx(first.token_logprobs[1:], rel=1e-4, abs=1e-5)
    assert len(pieces) > 3


def test_chats_and_responses_are_answered(client: openai.OpenAI) -> None:
    question = f"{PROMPT}\nWhat is the pass key for the silver lantern?"
    chat = client.chat.completions.create(
        model=EMBEDDED_MODEL_NAME, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=16
    )
    answer = client.responses.create(model=EMBEDDED_MODEL_NAME, input=question, temperature=0, max_output_tokens=16)
    assert chat.choices[0].message.content == answer.output_text
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens > 0


def test_requests_without_a_temperature_are_greedy_as_the_models_file_says(client: openai.OpenAI) -> None:
    texts = [complete(client, max_tokens=12, ignore_eos=True).choices[0].text for _ in range(2)]
    texts.append(complete(client, max_tokens=12, ignore_eos=True, temperature=0).choices[0].text)
    assert len(set(texts)) == 1
    assert client.responses.create(model=EMBEDDED_MODEL_NAME, input="Hello", max_output_tokens=1).temperature == 0


def test_what_nothing_can_follow_is_an_error_of_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Unsatisfiable schema"):
        complete(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}})
    assert complete(client, max_tokens=2).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "attack",
    [
        sampling.tiny_temperatures_are_greedy,
        sampling.tiny_shares_are_greedy,
        sampling.ends_of_ranges_are_answered,
        sampling.choices_of_the_last_seed_are_those_of_their_own,
        sampling.forbidden_tokens_have_log_probabilities,
        sampling.numbers_beyond_ranges_are_refused,
    ],
)
def test_numbers_at_the_edge_are_answered_rightly_or_refused(
    client: openai.OpenAI, attack: Callable[[int], None]
) -> None:
    assert client.base_url.port is not None
    attack(client.base_url.port)
