"""Which kind of request a path is: few words, whatever callers ask for."""

from __future__ import annotations

import re
from typing import Literal, get_args

PathClass = Literal[
    "completions", "chats", "responses", "messages", "documents", "text", "models", "probes", "metrics", "page", "other"
]
PATH_CLASSES: tuple[PathClass, ...] = get_args(PathClass)

# Probes, scrapes, and what the page asks for while somebody types: one line of the log for each would drown the rest.
QUIET = frozenset[PathClass]({"probes", "metrics", "page", "text", "models"})

_ENDS: tuple[tuple[str, PathClass], ...] = (
    (r"/health|/ready", "probes"),
    (r"/metrics", "metrics"),
    (r"/|/playground(/.*)?|/docs|/openapi\.json", "page"),
    (r"/v1/chat/completions", "chats"),
    (r"/v1/completions", "completions"),
    (
        r"/v1/text|/tokenize|/detokenize|/tokenizer_info|/v1/estimate|/v1/messages/count_tokens|/v1/responses/input_tokens",
        "text",
    ),
    (r"/v1/messages", "messages"),
    (r"/v1/responses(/.*)?", "responses"),
    (r"/v1/(documents|files)(/.*)?", "documents"),
    (r"/v1/models(/.*)?|/v1/attention/.*|/version", "models"),
)
_PATTERNS: tuple[tuple[re.Pattern[str], PathClass], ...] = tuple((re.compile(text), name) for text, name in _ENDS)


def path_class(path: str) -> PathClass:
    """The kind of a request to `path`, which may have a query."""
    path = path.partition("?")[0]
    for pattern, name in _PATTERNS:
        if pattern.fullmatch(path):
            return name
    return "other"
