"""The two forms of an error on the wire: OpenAI's, and Anthropic's for requests of its protocol.

Anthropic's is told apart by the path, or by the header `anthropic-version` where the path is not OpenAI's alone. So
what is refused before there is a route, such as a missing key or an unknown URL, has the form that the client reads.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from longreach.errors import ApiError, ContextLengthError

_MESSAGES = b"/v1/messages"
_ALL = b"/v1"
# Nobody who sends a request to one of these reads the other form, whatever headers a proxy adds.
_NOT_ANTHROPIC = (b"/v1/chat", b"/v1/completions", b"/v1/responses", b"/v1/attention")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether an HTTP request is one of Anthropic's protocol."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    if _is_under(path, _MESSAGES):
        return True
    if not _is_under(path, _ALL) or any(_is_under(path, tree) for tree in _NOT_ANTHROPIC):
        return False
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def error_object(error: ApiError, scope: Scope | None, request_id: str) -> dict[str, Any]:
    """An error in the form of the request's protocol; OpenAI's where no request is known."""
    return error.body() if scope is None or not speaks_anthropic(scope) else anthropic_error(error, request_id)


def id_headers(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    """The headers that tell a request's id; Anthropic's clients read it from one of their own."""
    names = (b"x-request-id", b"request-id") if speaks_anthropic(scope) else (b"x-request-id",)
    return [(name, request_id.encode()) for name in names]


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """An error as Anthropic has it; `param` and `code` are ours.

    A prompt that is too long has Anthropic's wording: clients match it to decide to shorten the conversation.
    """
    told = {
        "type": _type(error),
        "message": _too_long(error) if isinstance(error, ContextLengthError) else error.message,
        "param": error.param,
        "code": error.code,
        **error.extra,
    }
    return {"type": "error", "error": told, "request_id": request_id}


def _type(error: ApiError) -> str:
    if error.status < 500 or error.status in _TYPES:
        return _TYPES.get(error.status, "invalid_request_error")
    # What passes by itself is an overload; a server that will not come back is not.
    return "overloaded_error" if "Retry-After" in error.headers else "api_error"


def _too_long(error: ContextLengthError) -> str:
    tokens = f"at least {error.n_prompt_tokens}" if error.at_least else str(error.n_prompt_tokens)
    if error.n_prompt_tokens >= error.n_ctx:
        return f"prompt is too long: {tokens} tokens > {error.n_ctx - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {tokens} + {error.max_tokens} > {error.n_ctx}, decrease "
        "input length or `max_tokens` and try again"
    )


def _is_under(path: bytes, tree: bytes) -> bool:
    return path == tree or path.startswith(tree + b"/")
