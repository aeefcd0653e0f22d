"""From the command line's words to a measurement: which server, which tokenizer, which policy."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import orjson

from longreach.bench.recall.client import Server, serving
from longreach.bench.recall.codec import Codec
from longreach.bench.recall.measure import Report, measure
from longreach.bench.recall.suite import Plan
from longreach.config import EMBEDDED_MODEL


def policy(text: str | None) -> Any:
    """An attention policy as it goes into a request: a name, or an object where the text is one in JSON.

    Raises:
        ValueError: it begins like an object and is none.
    """
    if text is None or not text.startswith("{"):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"attention: {text!r} is not valid JSON: {error}") from None


def run(
    target: str | None,
    plan: Plan,
    *,
    attention: str | None = None,
    tokenizer: Path | None = None,
    concurrency: int = 1,
    report: Report = print,
) -> dict[str, Any]:
    """Measure a running server (`target` is its URL) or a model, which is served for as long as it takes.

    `tokenizer` is the directory of the served model's tokenizer; a model's directory has its own, and a URL is taken to
    serve the embedded model if it is not given.

    Raises:
        ValueError: there is no such server, model or tokenizer, or the server refused a prompt or the policy.
    """
    remote = target is not None and target.startswith(("http://", "https://"))
    own = EMBEDDED_MODEL if target is None or remote else Path(target)
    if tokenizer is None and not own.is_dir():
        raise ValueError(f"{target} is no directory: name that of its tokenizer with --tokenizer")
    codec = Codec.load(tokenizer or own)
    value = policy(attention)
    with contextlib.nullcontext(target) if remote else serving(target) as url:
        assert url is not None
        result = measure(Server(url, value), codec, plan, concurrency, report)
    result["attention"] = value
    return result
