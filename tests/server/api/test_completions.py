"""`/v1/completions` as the openai client sees it."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import orjson
import pytest
from longreach.engine.errors import RequestFailedError
from longreach.text.tokenizer import Tokenizer
from openai.types import Completion

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.fake_engine import EOS_ID

PROMPT = "The owl 🦉 trägt eine Laterne."


def test_an_answer_has_text_usage_and_a_finish_reason(server: LiveServer, tokenizer: Tokenizer) -> None:
    answer = server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=200)
    assert isinstance(answer, Completion)
    Completion.model_validate(answer.model_dump(), strict=True)
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (PROMPT, "stop", 0, None)
    prompt_tokens = len(tokenizer.encode_here(PROMPT))
    assert answer.usage is not None
    # The end-of-sequence token is generated and counted, the beginning-of-sequence token is part of the prompt.
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == prompt_tokens
    assert answer.usage.total_tokens == 2 * prompt_tokens


def test_a_stream_has_the_same_text_and_exactly_one_finish_reason(server: LiveServer) -> None:
    chunks = list(server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=200, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len(chunks) > 5
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    assert all(
        set(chunk.model_dump(exclude_unset=True)) == {"id", "object", "created", "model", "choices"} for chunk in chunks
    )


def test_usage_comes_in_a_last_chunk_when_asked_for(server: LiveServer) -> None:
    stream = server.openai.completions.create(
        model=MODEL, prompt=[5, 6, 7], max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (3, 2, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_how_much_of_the_prompt_was_cached(server: LiveServer, stream: bool) -> None:
    server.engine.cached = 2
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = server.openai.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2, **more)
    usage = list(answer)[-1].usage if stream else answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_priority_salt_and_speculation_reach_the_engine(make_server: Callable[..., LiveServer]) -> None:
    with make_server(speculate=3, allow_priority=True) as server:
        for fields in ({}, {"priority": -2, "cache_salt": "tenant", "speculate": 0}, {"priority": None}):
            assert server.complete(**fields).status_code == 200
        asked = [(request.priority, request.cache_salt, request.speculate) for request in server.engine.requests]
    assert asked == [(0, "", 3), (-2, "tenant", 0), (0, "", 3)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tier", "said"), [("flex", "flex"), ("auto", "default"), ("default", "default"), (None, None)]
)
def test_the_service_tier_reaches_the_engine_and_the_answer_says_it(
    server: LiveServer, tier: Any, said: str | None, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "stream": stream, "extra_body": {"service_tier": tier}}
    text = server.openai.completions.create(prompt=[5, 6, 7], max_tokens=2, **asked)
    chat = server.openai.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], max_tokens=2, **asked)
    response = server.openai.responses.create(input="Hi", max_output_tokens=16, **asked)
    found = []
    for answer in (text, chat, response):
        last = list(answer)[-1] if stream else answer
        found.append(getattr(getattr(last, "response", last), "service_tier", None))
    assert found == [said] * 3
    assert [request.flexible for request in server.engine.requests] == [tier == "flex"] * 3


def test_max_tokens_ends_with_length_and_defaults_to_16(server: LiveServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_here("The keeper of the lantern walks along the river over and over again, all the night.")
    answer = server.openai.completions.create(model=MODEL, prompt=ids)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert server.openai.completions.create(model=MODEL, prompt=ids, max_tokens=3).usage.completion_tokens == 3  # type: ignore[union-attr]


def test_what_is_asked_for_reaches_the_engine(server: LiveServer) -> None:
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": -3, "min_tokens": 2, "max_tokens": 5}
    assert server.complete(prompt=[9, 8], **fields).status_code == 200
    [request] = server.engine.requests
    assert (request.prompt, request.max_tokens, request.min_tokens, request.stop_token_ids) == ([9, 8], 5, 2, [EOS_ID])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, -3)


def test_defaults_are_openais(server: LiveServer) -> None:
    nulls = dict.fromkeys(["temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "stop", "stream"])
    assert server.complete(prompt=[9]).status_code == 200
    assert server.complete(prompt=[9], **nulls).status_code == 200
    for request in server.engine.requests:
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, None)
        assert (request.max_tokens, request.min_tokens) == (16, 0)


@pytest.mark.parametrize(("asked", "told"), [(-1, 0), (0, 0), (2**31 - 1, 400)])
def test_top_k_without_a_limit_and_beyond_the_vocabulary(server: LiveServer, asked: int, told: int) -> None:
    assert server.complete(top_k=asked).status_code == 200
    assert server.engine.requests[0].sampling.top_k == told


def test_the_token_that_ends_an_answer_is_counted_and_is_no_text(server: LiveServer, tokenizer: Tokenizer) -> None:
    # Some models end with a token that their tokenizer does not call special: its text would show.
    [_, end] = tokenizer.encode_here("!")
    server.engine.info = msgspec.structs.replace(server.engine.info, eos_token_ids=[end])
    answer = server.complete(prompt="owl!").json()
    assert answer["choices"][0] == {"index": 0, "text": "owl", "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == len(server.engine.requests[0].prompt) - 1
    assert not server.engine.cancelled  # the engine itself had finished


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_an_answer_has_its_log_probability(
    server: LiveServer, tokenizer: Tokenizer, stream: bool
) -> None:
    # Clients that score a prompt by `echo` and one more token leave the last entry out, whatever that token was.
    [_, end] = tokenizer.encode_here("!")
    server.engine.info = msgspec.structs.replace(server.engine.info, eos_token_ids=[end])
    answer: Any = server.openai.completions.create(model=MODEL, prompt="owl!", logprobs=0, echo=True, stream=stream)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    text = "".join(choice.text for choice in choices)
    assert (text, choices[-1].finish_reason) == ("owl!owl", "stop")
    assert "".join(token for part in parts for token in part.tokens) == "<|begin|>owl!owl!"
    assert (parts[-1].text_offset[-1], parts[-1].token_logprobs[-1]) == (len(text), -end / 100)


def test_ignore_eos_goes_on_to_max_tokens(server: LiveServer) -> None:
    answer = server.complete(prompt=[9, 8], ignore_eos=True, max_tokens=40).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 40
    assert server.engine.requests[0].stop_token_ids == []


def test_a_string_prompt_gets_bos_and_its_special_tokens_are_read(server: LiveServer, tokenizer: Tokenizer) -> None:
    server.complete(prompt="<|end|>ab")
    assert server.engine.requests[0].prompt[:2] == [0, EOS_ID]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_text_before_it(server: LiveServer, stream: bool) -> None:
    text = "The owl 🦉 and the family"
    fields = {"model": MODEL, "prompt": text, "stop": ["nowhere", "🦉 an"], "max_tokens": 100}
    if stream:
        chunks = list(server.openai.completions.create(**fields, stream=True))
        answer = "".join(chunk.choices[0].text for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        whole = server.openai.completions.create(**fields)
        answer, finish = whole.choices[0].text, whole.choices[0].finish_reason
        # Usage counts what was generated: the owl's tokens too, but nothing after the match.
        usage, prompt = whole.usage, server.engine.requests[0].prompt
        assert usage is not None
        assert len(answer.encode()) // 8 < usage.completion_tokens < len(prompt)
    assert (answer, finish) == ("The owl ", "stop")
    assert len(server.engine.cancelled) == 1


def test_stop_strings_wait_for_min_tokens(server: LiveServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_here("x.x.x.x.x.")[1:]
    assert len(ids) == 10
    answer = server.complete(prompt=ids, stop=".", min_tokens=5, max_tokens=10).json()
    assert answer["choices"][0]["text"] == "x.x.x"
    assert answer["usage"]["completion_tokens"] == 6


def test_what_a_stop_string_held_back_comes_out_at_the_end(server: LiveServer) -> None:
    for stream in (False, True):
        text = server.complete(prompt="the lantern", stop="lantern of", stream=stream, max_tokens=50)
        assert "the lantern" in (text.json()["choices"][0]["text"] if not stream else _joined(text.text))


def test_a_character_cut_by_max_tokens_becomes_a_replacement_character(
    server: LiveServer, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode_here("€")[1:]
    assert len(ids) > 1
    assert server.complete(prompt=ids, max_tokens=len(ids) - 1).json()["choices"][0]["text"] == "\ufffd"


def test_eight_clients_at_once_get_what_each_gets_alone(server: LiveServer) -> None:
    prompts = [f"The keeper number {i} walks {'on ' * i}" for i in range(8)]

    def ask(prompt: str) -> str:
        return server.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=100).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == prompts


def test_models(server: LiveServer) -> None:
    [model] = server.openai.models.list().data
    assert model.id == MODEL
    assert model.object == "model"
    assert model.to_dict()["max_model_len"] == 65536
    assert model.to_dict()["description"] is None
    assert server.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("gpt-4")


def test_version(server: LiveServer) -> None:
    assert set(server.http.get("/version").json()) == {"version"}


def texts(server: LiveServer, **fields: Any) -> list[str]:
    """The texts of all choices, in order, which a stream must agree with."""
    whole = server.complete(**fields).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
    found = [choice["text"] for choice in whole["choices"]]
    body = {"model": MODEL, "prompt": "The owl"} | fields
    chunks = list(
        server.openai.completions.create(**{n: body.pop(n) for n in ("model", "prompt")}, extra_body=body, stream=True)
    )
    streamed = ["".join(c.text for chunk in chunks for c in chunk.choices if c.index == i) for i in range(len(found))]
    assert streamed == found
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason is not None]
    assert sorted(ends) == list(range(len(found)))
    return found


def test_n_answers_share_a_prompt_and_have_seeds_of_their_own(server: LiveServer, tokenizer: Tokenizer) -> None:
    server.engine.answer = lambda request: [(request.sampling.seed or 0) % 300] * 3
    assert texts(server, prompt=[9, 8], n=3, seed=40) == [_decoded(tokenizer, [seed] * 3) for seed in (40, 41, 42)]
    requests = server.engine.requests[:3]
    assert [request.sampling.seed for request in requests] == [40, 41, 42]
    assert {tuple(request.prompt) for request in requests} == {(9, 8)}
    usage = server.complete(prompt=[9, 8], n=3, seed=40).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 12)  # each answer ends with a token of its own
    assert server.complete(n=2, seed=2**63 - 1).status_code == 200
    assert server.engine.requests[-1].sampling.seed == -(2**63)


@pytest.mark.parametrize("prompt", [["a b", "c"], [[5, 6], [7]]])
def test_a_batch_of_prompts_is_answered_in_order(server: LiveServer, tokenizer: Tokenizer, prompt: list) -> None:
    expected = [p if isinstance(p, str) else _decoded(tokenizer, p) for p in prompt]
    assert texts(server, prompt=prompt, n=2) == [text for text in expected for _ in range(2)]
    lengths = [len(p) if isinstance(p, list) else len(tokenizer.encode_here(p)) for p in prompt]
    assert server.complete(prompt=prompt).json()["usage"]["prompt_tokens"] == sum(lengths)


def test_best_of_returns_the_likeliest(server: LiveServer) -> None:
    # The fake engine's log-probability of token t is -t / 100.
    server.engine.answer = lambda request: [[50, 60], [20, 20], [40, 40, 40]][(request.sampling.seed or 0) % 3]
    whole = server.complete(best_of=3, n=2, seed=0, ignore_eos=True, max_tokens=4, logprobs=0).json()
    scores = [choice["logprobs"]["token_logprobs"] for choice in whole["choices"]]
    assert scores == [[-0.2] * 4, [-0.4] * 4]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"]["completion_tokens"] == 12
    plain = server.complete(best_of=3, seed=0, ignore_eos=True, max_tokens=4).json()
    assert [choice["logprobs"] for choice in plain["choices"]] == [None]
    assert plain["choices"][0]["text"] == whole["choices"][0]["text"]


def test_one_answer_that_fails_ends_all_of_its_request(server: LiveServer) -> None:
    server.engine.failure = RequestFailedError("odd", "invalid")
    assert server.complete(n=3).status_code == 400
    server.engine.failure = None
    server.engine.hold_decode_after = 1
    with server.connect(orjson.dumps({"model": MODEL, "prompt": "The owl", "n": 3})):
        eventually(lambda: len(server.engine.running) == 3)
    eventually(lambda: not server.engine.running)
    assert len(server.engine.cancelled) >= 3


def test_echo_puts_the_prompt_before_each_answer(server: LiveServer, tokenizer: Tokenizer) -> None:
    assert texts(server, echo=True, n=2) == ["The owlThe owl"] * 2
    assert texts(server, prompt=[5, 6], echo=True) == [_decoded(tokenizer, [5, 6]) * 2]
    assert texts(server, echo=True, max_tokens=0) == ["The owl"]
    whole = server.complete(echo=True, max_tokens=0, logprobs=0).json()
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["logprobs"]["text_offset"][-1] < len("The owl")
    assert whole["usage"]["completion_tokens"] == 0


def test_logprobs_of_answer_and_prompt(server: LiveServer, tokenizer: Tokenizer) -> None:
    text = "The owl €"
    ids = tokenizer.encode_here(text)
    for stream in (False, True):
        answer: Any = server.openai.completions.create(
            model=MODEL, prompt=ids, logprobs=2, echo=True, max_tokens=len(ids) - 1, stream=stream
        )
        parts = [c.logprobs for chunk in (answer if stream else [answer]) for c in chunk.choices if c.logprobs]
        tokens = [token for part in parts for token in part.tokens]
        logprobs = [value for part in parts for value in part.token_logprobs]
        offsets = [place for part in parts for place in part.text_offset]
        tops = [top for part in parts for top in part.top_logprobs]
        assert logprobs == [None, *(-token / 100 for token in ids[1:] + ids[1:])]
        assert tokens[0] == "<|begin|>"
        assert tops[0] is None
        assert all(len(top) == 2 and top[token] == value for top, token, value in zip(tops, tokens, logprobs) if top)  # noqa: B905
        whole = text * 2
        named = [(t, o) for t, o in zip(tokens[1:], offsets[1:], strict=True) if not t.startswith("bytes:")]
        assert all(whole[offset : offset + len(token)] == token for token, offset in named)
        assert any(token.startswith("bytes:\\x") for token in tokens)


def test_logprobs_end_where_the_text_does(server: LiveServer) -> None:
    choice = server.complete(prompt="x.y.z", stop="y.", logprobs=0, max_tokens=20).json()["choices"][0]
    assert choice["text"] == "x."
    assert "".join(choice["logprobs"]["tokens"]) == "x."
    assert choice["logprobs"]["top_logprobs"] == [{}, {}]


def test_a_prompt_too_long_to_score_at_once_is_sent_to_the_stream(make_server: Callable[..., LiveServer]) -> None:
    with make_server(max_model_len=100_000) as server:
        fields = {"prompt": [5] * 70_000, "echo": True, "logprobs": 0, "max_tokens": 0}
        refused = server.complete(**fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        assert server.complete(**fields, stream=True).status_code == 200


def test_what_shapes_the_logits_reaches_the_engine(server: LiveServer) -> None:
    fields = {"min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    assert server.complete(**fields, logit_bias={"5": -100, "399": 1.5}).status_code == 200
    sampling = server.engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.logit_bias == {5: -100.0, 399: 1.5}


def test_stop_tokens_end_an_answer_with_their_text_if_asked(server: LiveServer, tokenizer: Tokenizer) -> None:
    [_, *ids] = tokenizer.encode_here("owl!ab")
    [_, end] = tokenizer.encode_here("!")
    for include, text in ((False, "owl"), (True, "owl!")):
        fields = {"stop_token_ids": [end], "include_stop_str_in_output": include}
        assert texts(server, prompt=ids, **fields) == [text]
        assert server.complete(prompt=ids, **fields).json()["choices"][0]["finish_reason"] == "stop"
    assert texts(server, prompt=ids, stop="!", include_stop_str_in_output=True) == ["owl!"]
    # The model's own end is no text, whatever is asked for.
    assert texts(server, prompt="ab", include_stop_str_in_output=True) == ["ab"]


def test_usage_in_every_chunk(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = list(
        server.openai.completions.create(
            model=MODEL, prompt=[5, 6, 7], max_tokens=2, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == [1, 2]
    assert last.usage is not None
    assert last.usage.completion_tokens == 2


def test_progress_is_told_while_the_prompt_is_read(server: LiveServer) -> None:
    server.engine.cached = 0
    chunks = list(
        server.openai.completions.create(
            model=MODEL, prompt=[5] * 30, max_tokens=2, stream=True, n=2, extra_body={"return_progress": True}
        )
    )
    told = [chunk.to_dict()["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk.to_dict()]
    assert [one["processed"] for one in told] == [8, 16, 24, 30]
    assert {(one["total"], one["cache"]) for one in told} == {(30, 0)}
    assert [one["eta_ms"] for one in told] == [60000, 60000, 60000, 0]
    assert all(one["time_ms"] >= 0 for one in told)
    assert all(not chunk.choices for chunk in chunks if "prompt_progress" in chunk.to_dict())


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def _joined(events: str) -> str:
    data = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(item)["choices"][0]["text"] for item in data)
