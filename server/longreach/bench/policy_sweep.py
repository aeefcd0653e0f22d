"""Which attention policies a load test asks for: by name, by a JSON object, or all that the server has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import orjson

from longreach.util.no_server import nobody_answers

DENSE = "dense"
ALL = "all"
_PATH = "/v1/attention/policies"


@dataclass(frozen=True)
class Policy:
    """A policy as a request carries it, in its short form or not, and what it is called; None where the server has no
    policies."""

    name: str
    attention: dict[str, Any] | str | None


def chosen(url: str, texts: Sequence[str], api_key: str | None = None) -> list[Policy]:
    """The policies named by `texts` (names, short forms or JSON objects), dense first whether it is named or not, since
    the others are compared with it.

    Raises:
        ValueError: a text is no JSON object, or names a policy that the server at `url` has not, or no server is there.
    """
    names = [DENSE, *(text for text in texts if text != DENSE)]
    known = _known(url, api_key)
    if ALL in names:
        names = [DENSE, *(name for name in known if name != DENSE), *(n for n in names[1:] if n != ALL)]
    return [_parsed(text, known) for text in dict.fromkeys(names)]


def _parsed(text: str, known: list[str]) -> Policy:
    if text == DENSE and not known:
        return Policy(DENSE, None)  # a server that knows but one attention; ours may have another default
    name, *values = text.split(":")
    if values and not text.startswith("{"):
        if name not in known:
            raise _unknown(text, known)
        return Policy(" ".join([name, *values]), text)
    attention: Any = {"policy": text}
    if text.startswith("{"):
        try:
            attention = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"--attention: {text!r} is not valid JSON: {error}") from None
    if attention.get("policy") not in known:
        raise _unknown(text, known)
    parameters = [f"{name} {value}" for name, value in attention.items() if name != "policy"]
    return Policy(" ".join([attention["policy"], *parameters]), attention)


def _unknown(text: str, known: list[str]) -> ValueError:
    return ValueError(f"--attention: the server has {', '.join(known) or 'no policies'}; got {text!r}")


def _known(url: str, api_key: str | None) -> list[str]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}{_PATH}", headers=headers, timeout=30)
        if answer.status_code == 404:
            return []
        return [policy["policy"] for policy in answer.raise_for_status().json()["data"]]
    except httpx.TransportError as error:
        raise ValueError(nobody_answers(url, error)) from None
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{url}{_PATH} does not list policies: {error or type(error).__name__}") from None
