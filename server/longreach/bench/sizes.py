"""Sizes of a load as text: 16k tokens, batches of 16x16k, 0.5 requests a second."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from longreach.bench.goodput import Objective
from longreach.bench.load import Load
from longreach.setting_values import Tokens

_TOKENS = TypeAdapter(Tokens)


def load_of(**sizes: Any) -> Load:
    """A `Load` of which some sizes are given as text.

    Raises:
        ValueError: one is not a positive number, or not written as it should be; the message names its flag.
    """
    for name, parse in _LISTS.items():
        if name in sizes:
            sizes[name] = tuple(parse(name, part) for part in sizes[name].split(",") if part)
    if "long_prompt" in sizes:
        sizes["long_prompt"] = _tokens("long_prompt", sizes["long_prompt"])
    for name, value in sizes.items():
        if isinstance(value, int | float) and value <= 0 and not isinstance(value, bool):
            raise ValueError(f"{_flag(name)}: give a positive number, got {value}")
    if "lengths" in sizes and not sizes["lengths"]:
        raise ValueError("--lengths: give one or more")
    if sizes.get("max_tokens", 2) < 2:
        raise ValueError("--max-tokens: give at least 2, so that there is a delay between tokens")
    if "ttft_slo" in sizes:
        sizes["objective"] = Objective(sizes.pop("ttft_slo"), sizes.pop("itl_slo"))
    return Load(**sizes)


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers with commas between them.

    Raises:
        ValueError: naming the option `name`.
    """
    try:
        return tuple(int(number) for number in text.split(",") if number)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is no list of numbers such as 1024,16384") from None


def _batch(name: str, text: str) -> tuple[int, int]:
    count, x, length = text.partition("x")
    if not x or not count.isdecimal() or int(count) < 1:
        raise ValueError(f"--batches: give requests x tokens, as in 16x16k, got {text!r}")
    return int(count), _tokens(name, length)


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{_flag(name)}: give whole numbers from 1, got {text!r}")
    return int(text)


def _rate(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{_flag(name)}: give requests a second, as in 0.5, got {text!r}")
    return value


def _tokens(name: str, text: str) -> int:
    try:
        value = _TOKENS.validate_python(text)
    except ValidationError as error:
        raise ValueError(f"{_flag(name)}: {error.errors()[0]['msg']}, got {text!r}") from None
    if value < 1:
        raise ValueError(f"{_flag(name)}: give a positive number of tokens, got {text!r}")
    return value


def _flag(name: str) -> str:
    return "--" + _FLAGS.get(name, name).replace("_", "-")


_FLAGS = {"concurrencies": "concurrency"}
_LISTS: dict[str, Callable[[str, str], Any]] = {
    "lengths": _tokens,
    "arrival_lengths": _tokens,
    "batches": _batch,
    "concurrencies": _count,
    "rates": _rate,
}
