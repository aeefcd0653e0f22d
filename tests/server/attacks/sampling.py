"""Numbers at the ends of their ranges and beyond, thrown at a server with the embedded model."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable
from typing import Any

MODEL = "longreach-default"
PROMPT = "The keeper of the lantern walks along the river. The keeper of the"
TINY = ("5e-324", "1e-45", "1e-38", "1e-30", "9e-6")


def post(port: int, body: str, path: str = "/v1/completions") -> tuple[int, Any]:
    """Send a body as it is; the status and the JSON of the answer, in which every number has to be one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read(), parse_constant=_no_number)
    finally:
        connection.close()


def _no_number(text: str) -> None:
    raise AssertionError(f"the answer has {text}, which is no JSON")


def completion(port: int, **fields: str) -> tuple[int, Any]:
    """Ask for a completion; `fields` are JSON texts."""
    known = {"model": f'"{MODEL}"', "prompt": json.dumps(PROMPT), "max_tokens": "4", "ignore_eos": "true"}
    return post(port, "{" + ", ".join(f'"{name}": {text}' for name, text in (known | fields).items()) + "}")


def texts(port: int, **fields: str) -> list[str]:
    """The texts of a completion that is answered."""
    status, answer = completion(port, **fields)
    assert status == 200, (fields, answer)
    return [choice["text"] for choice in answer["choices"]]


def refused(answered: tuple[int, Any], field: str) -> None:
    """Assert a 400 that names the field, or an item of it."""
    status, answer = answered
    assert status == 400, (field, answer)
    param = answer["error"]["param"]  # None: it was no JSON
    assert param is None or param.split(".")[0] == field, answer
    assert answer["error"]["message"], answer


def tiny_temperatures_are_greedy(port: int) -> None:
    """Temperatures from 0 to just below 1e-5, some of which float32 or JSON's doubles have no number for."""
    [greedy] = texts(port, temperature="0")
    for temperature in (*TINY, "-0.0", "1e-400", "0e5"):
        assert texts(port, temperature=temperature, n="2", seed="7", speculate="4") == [greedy] * 2, temperature


def tiny_shares_are_greedy(port: int) -> None:
    """The smallest `top_p`, and whatever else leaves one token, at temperatures that are not small."""
    [greedy] = texts(port, temperature="0")
    for temperature in ("0.7", "2"):
        for top_p in TINY:
            assert texts(port, temperature=temperature, top_p=top_p, n="2") == [greedy] * 2, top_p
        assert texts(port, temperature=temperature, top_k="1", n="2") == [greedy] * 2
    for top_p in ("0", "-0.0", "1e-400", "1.0000001"):
        refused(completion(port, top_p=top_p), "top_p")


ENDS: dict[str, tuple[str, ...]] = {
    "top_p": ("5e-324", "0.9999999999", "1", "1.0"),
    "min_p": ("0", "-0.0", "5e-324", "1e-45", "0.9999999999", "1"),
    "top_k": ("-1", "0", "1", "2147483647"),
    "presence_penalty": ("-2", "2", "5e-324"),
    "frequency_penalty": ("-2", "2", "-0.0"),
    "repetition_penalty": ("0.1", "10"),
    "seed": ("-9223372036854775808", "9223372036854775807", "-1", "0"),
    "min_tokens": ("0", "2"),
    "logit_bias": ('{"0": 100, "1": -100}', '{"0": 5e-324}', "{}", '{"2": 1e-400}'),
    "n": ("1", "16"),
    "logprobs": ("0", "20"),
    "speculate": ("0", "32"),
}


def ends_of_ranges_are_answered(port: int) -> None:
    """Each field at its ends, at temperatures from the coldest to the hottest, and all of the ends at once."""
    for name, values in ENDS.items():
        for value, temperature in zip(values, ("2", "1e-5", "1", "1e-45") * 2, strict=False):
            texts(port, **{"max_tokens": "2", "temperature": temperature, name: value})
    for place in (0, -1):
        texts(port, max_tokens="2", temperature="2", **{name: values[place] for name, values in ENDS.items()})


def choices_of_the_last_seed_are_those_of_their_own(port: int) -> None:
    """A seed at the end of its range with several choices, whose seeds go round."""
    last, first = 2**63 - 1, -(2**63)
    both = texts(port, temperature="2", seed=str(last), n="2")
    assert both == [*texts(port, temperature="2", seed=str(last)), *texts(port, temperature="2", seed=str(first))]


def forbidden_tokens_have_log_probabilities(port: int) -> None:
    """Log-probabilities beside biases, with all of the prompt's: numbers from -9999 to 0."""
    for fields in (
        {"logprobs": "20", "echo": "true", "max_tokens": "2"},
        {"logprobs": "20", "logit_bias": '{"1": -100, "5": 100}', "repetition_penalty": "10", "min_tokens": "4"},
    ):
        status, answer = completion(port, **(fields | {"temperature": "0"}))
        assert status == 200, answer
        scores = answer["choices"][0]["logprobs"]
        own = scores["token_logprobs"][1:] if "echo" in fields else scores["token_logprobs"]
        others: Iterable[float] = (value for place in scores["top_logprobs"] if place for value in place.values())
        assert own
        assert all(-9999 <= value <= 0 for value in (*own, *others)), scores


BEYOND: dict[str, tuple[str, ...]] = {
    "temperature": (
        "-1e-300",
        "2.0000001",
        "1E400",
        "-1E400",
        "NaN",
        "Infinity",
        '"0"',
        "true",
        "9" * 4000,
        "[0]",
        "{}",
    ),
    "top_p": ("1e999", "-1e-300", "NaN", "false", "[]"),
    "top_k": ("-2", "2147483648", "1.5", "1e30", "9" * 4000, "true"),
    "min_p": ("-1e-300", "1.1", "1E400"),
    "presence_penalty": ("-2.1", "1E400", "-Infinity", "true"),
    "frequency_penalty": ("2.1", "9" * 400),
    "repetition_penalty": ("0", "0.0999", "10.1", "1e-400", "1E400"),
    "logit_bias": (
        '{"1": 1E400}',
        '{"1": 100.1}',
        '{"1": 1, "01": 2}',
        '{"-1": 1}',
        '{"1e1": 1}',
        '{"9999999999": 1}',
    ),
    "seed": ("9223372036854775808", "-9223372036854775809", "1.5", "1e-5", "9" * 5000, "true", '"1"'),
    "min_tokens": ("-1", "5", "16777217", "1.5", "9" * 400),
    "n": ("0", "-1", "17", "1.5", "9" * 400, "true"),
    "logprobs": ("-1", "21", "1.5", "true"),
    "max_tokens": ("0", "-2", "1.5", "16777217", "9" * 4000, '"6"'),
    "stop_token_ids": ("[-1]", "[1e400]", "[2147483648]", "[null]", "[[1]]", "[1.0]", "[true]"),
    "stop": ("[null]", "[[]]", '[["a"]]', "[1]", "{}", "1e400"),
    "prompt": ("[1.0]", "[-1]", "[2147483648]", "[null]", "[[[1]]]", "[1e400]", "[{}]", "null", '[["a"]]'),
}


def numbers_beyond_ranges_are_refused(port: int) -> None:
    """Numbers outside of every field's range, of another type, or that JSON does not have."""
    for name, values in BEYOND.items():
        for value in values:
            refused(completion(port, **{name: value}), name)
