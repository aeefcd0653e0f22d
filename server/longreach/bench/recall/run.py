"""From the command line's words to a measurement: which server, which tokenizer, which policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from longreach import hub
from longreach.bench.launch import is_url, served
from longreach.bench.recall.client import Server
from longreach.bench.recall.measure import Report, measure
from longreach.bench.recall.sampler import Sampler
from longreach.bench.recall.suite import Plan, prompts
from longreach.config import EMBEDDED_MODEL
from longreach.errors import ModelFilesError
from longreach.setting_values import check_tokenizer


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


def tokenizer_of(source: Path | str | None) -> Tokenizer:
    """The tokenizer of a model's directory or of a hub id; None: the embedded model's.

    Raises:
        ValueError: there is no tokenizer.json to be had.
    """
    name = str(source or EMBEDDED_MODEL)
    try:
        check_tokenizer(name)
    except ValueError:  # which speaks of a server's setting
        raise ValueError(f"{name} has no tokenizer.json; name a directory or a hub id that has one") from None
    try:
        return Tokenizer.from_file(str(hub.tokenizer_files(name) / hub.TOKENIZER))
    except ModelFilesError as error:
        raise ValueError(f"--tokenizer: {error}") from None


def measured(
    server: Server, tokenizer: Tokenizer, plan: Plan, concurrency: int = 1, report: Report = print
) -> dict[str, Any]:
    """Measure the prompts of the plain sampler; see `measure`."""
    sampler = Sampler(tokenizer)
    return measure(server, plan, lambda task, length: prompts(sampler, plan, task, length), concurrency, report)


def run(
    target: str | None,
    plan: Plan,
    *,
    attention: str | None = None,
    tokenizer: str | None = None,
    concurrency: int = 1,
    flags: Sequence[str] = (),
    api_key: str | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Measure a running server (`target` is its URL) or a model, which is served with `flags` for as long as it takes.

    `tokenizer` is the directory or hub id of the served model's tokenizer. A model's directory has its own, and a URL
    is taken to serve the embedded model if it is not given.

    Raises:
        ValueError: there is no such server, model or tokenizer, or the server refused a prompt or the policy.
    """
    own = None if target is None or is_url(target) else target
    if tokenizer is None and own is not None and not Path(own).is_dir():
        raise ValueError(f"{target} is no directory: name that of its tokenizer with --tokenizer")
    cut = tokenizer_of(tokenizer or own)
    value = policy(attention)
    with served(target, flags) as running:
        result = measured(Server(running.url, value, api_key), cut, plan, concurrency, report)
    return result | {"attention": value}
