"""What can go wrong outside the engine, and how each error reads to the person who meets it.

LongreachError
├── ConfigError                   a setting is wrong; the message names the flag and the fix
├── ModelFilesError               a file of the model cannot be had, or says what cannot be used
├── TokenizerError                the model's tokenizer cannot be loaded or is of a kind that is not supported
└── ApiError                      an HTTP answer: status, OpenAI error object, headers
    ├── InvalidRequestError       400, the caller's fault; `param` names the field
    │   └── ContextLengthError    400, `context_length_exceeded`
    ├── AuthenticationError       401, `invalid_api_key`
    ├── ModelNotFoundError        404, `model_not_found`
    ├── ThreadNotFoundError       404, `thread_not_found`
    ├── RequestTimeoutError       408, the request did not arrive in time
    ├── BodyTooLargeError         413
    ├── MediaTypeError            415
    ├── OverloadedError           429, with Retry-After
    ├── DeadlineRefusedError      429, `deadline_cannot_be_met`
    ├── DeadlineExceededError     504, `deadline_exceeded`
    ├── HttpError                 4xx of HTTP itself: no such URL, not that method, no HTTP at all
    ├── InternalError             500, without internals; the request id finds the log line
    └── UnavailableError          503: loading, draining, or a process that is needed is gone

The engine's own errors are in `longreach.engine.errors`, those of documents in `longreach.documents.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

# The most seconds that any `Retry-After` names: callers should look again, however long what waits may take.
MAX_RETRY_AFTER = 60


class LongreachError(Exception):
    """Base of the errors above."""


class ConfigError(LongreachError):
    """A setting is wrong. The message has one line per setting and names the flag and the fix."""


class ModelFilesError(LongreachError):
    """A file of the model cannot be had, or says what cannot be used. The message names the file and the fix."""


class TokenizerError(LongreachError):
    """The tokenizer cannot be loaded, or its decoder cannot be streamed."""


class ApiError(LongreachError):
    """An error that is an HTTP answer: `{"error": {message, type, param, code, ...}}`.

    `extra` holds further members of the error object, `headers` further response headers.
    """

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.extra = extra or {}
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error object as it is sent."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code, **self.extra}
        return {"error": error}


class InvalidRequestError(ApiError):
    """The request is wrong; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit. The wording is OpenAI's: clients match it to decide to shorten the prompt."""

    def __init__(
        self,
        n_prompt_tokens: int,
        max_tokens: int,
        n_ctx: int,
        *,
        param: str,
        at_least: bool = False,
        estimate: int | None = None,
    ) -> None:
        """`at_least`: the prompt was not read to its end and has no fewer tokens; `estimate`: about how many."""
        self.n_prompt_tokens, self.max_tokens, self.n_ctx, self.at_least = n_prompt_tokens, max_tokens, n_ctx, at_least
        more = "at least " if at_least else ""
        super().__init__(
            f"This model's maximum context length is {n_ctx} tokens. However, you requested {more}"
            f"{n_prompt_tokens + max_tokens} tokens ({more}{n_prompt_tokens} in the prompt, {max_tokens} for the "
            "completion). Please reduce the length of the prompt or max_tokens.",
            param=param,
            code="context_length_exceeded",
            extra={
                ("n_prompt_tokens_at_least" if at_least else "n_prompt_tokens"): n_prompt_tokens,
                **({} if estimate is None else {"n_prompt_tokens_estimate": estimate}),
                "n_ctx": n_ctx,
            },
        )
        tokens = n_prompt_tokens if estimate is None else max(estimate, n_prompt_tokens)
        self.fitting_part = max(n_ctx - max_tokens, 0) / max(tokens, 1)  # of the prompt; at most that, with `at_least`


class AuthenticationError(ApiError):
    """The request has no key of this server."""

    status = 401
    type = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__(
            "This server needs an API key: send the header `Authorization: Bearer KEY` or `x-api-key: KEY` with a "
            "valid one, or both with the same one.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class HttpError(ApiError):
    """What HTTP itself finds wrong."""

    type = "invalid_request_error"

    def __init__(self, message: str, *, code: str | None, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(message, code=code, headers=headers)
        self.status = status


class RequestTimeoutError(ApiError):
    """Headers or body took longer to arrive than is allowed."""

    status = 408
    type = "invalid_request_error"

    def __init__(self, part: str, seconds: float) -> None:
        # Clients send again after a 408 unasked; what took too long now would take too long again.
        super().__init__(
            f"The request's {part} did not arrive within {seconds:g} seconds.",
            code="request_timeout",
            headers={"x-should-retry": "false"},
        )


class ThreadNotFoundError(ApiError):
    """A message would continue a thread, and none is kept here. Anthropic's SDKs then send the whole history."""

    status = 404
    type = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__(
            "No threads are kept here: send the whole conversation, with `thread` null or of the type `create`.",
            param="thread",
            code="thread_not_found",
            extra={"details": {"error_code": "thread_not_found"}},
        )


class ModelNotFoundError(ApiError):
    """The request names a model that is not served here."""

    status = 404
    type = "invalid_request_error"

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(
            f"The model {quoted(name)} does not exist. This server serves {' or '.join(map(quoted, served))}. Ask for "
            "that, or start the server with --served-model-name and this name, too.",
            param="model",
            code="model_not_found",
        )


class BodyTooLargeError(ApiError):
    """The request body is longer than `--max-body-bytes`."""

    status = 413
    type = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is longer than the {limit} bytes allowed.", code="body_too_large")


class MediaTypeError(ApiError):
    """The request body is not declared as plain JSON."""

    status = 415
    type = "invalid_request_error"


class OverloadedError(ApiError):
    """Too much is here already; the header says when to look again, at most `MAX_RETRY_AFTER` seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after: int, code: str = "queue_full") -> None:
        super().__init__(message, code=code, headers={"Retry-After": _retry_after(retry_after)})


class DeadlineRefusedError(ApiError):
    """The first token cannot come by the request's deadline, as far as can be predicted.

    Where an empty queue would do, the header says when that may be; clients do not send it again unasked.
    """

    status = 429
    type = "rate_limit_error"

    def __init__(self, deadline_ms: int, predicted: float, alone: float, retry_after: int | None) -> None:
        """Times are in seconds from the request's arrival: in the present queue, and without one."""
        if retry_after is None:
            why = f"without a queue it takes {alone:.2f} seconds. Allow more time, or shorten what is not cached"
        else:
            why = f"without a queue it takes {alone:.2f} seconds. Allow more time, or come again later"
        super().__init__(
            f"`deadline_ms`: the first token cannot come within {deadline_ms} ms: it is predicted in {predicted:.2f} "
            f"seconds; {why}.",
            param="deadline_ms",
            code="deadline_cannot_be_met",
            extra={
                "deadline_ms": deadline_ms,
                "predicted_ms": round(1000 * predicted),
                "predicted_alone_ms": round(1000 * alone),
            },
            headers={
                "x-should-retry": "false",
                **({} if retry_after is None else {"Retry-After": _retry_after(retry_after)}),
            },
        )


class DeadlineExceededError(ApiError):
    """The first token has not come by the request's deadline. Nothing goes on for it."""

    status = 504
    type = "timeout_error"

    def __init__(self, deadline_ms: int) -> None:
        super().__init__(
            f"`deadline_ms`: the first token has not come within {deadline_ms} ms; the request has been ended.",
            param="deadline_ms",
            code="deadline_exceeded",
            extra={"deadline_ms": deadline_ms},
            headers={"x-should-retry": "false"},
        )


class InternalError(ApiError):
    """Something failed that the caller cannot mend. The log has the cause, under the request id."""

    def __init__(self, request_id: str) -> None:
        # The OpenAI client silently sends a request again after a 5xx; a long prompt is too dear for that.
        super().__init__(
            f"The server failed to process the request (request id {request_id}).",
            code="internal_error",
            headers={"x-should-retry": "false"},
        )


class UnavailableError(ApiError):
    """The server cannot take or finish requests at this moment."""

    status = 503
    type = "service_unavailable"

    def __init__(self, message: str, *, code: str, retry_after: int | None = None, retry: bool = True) -> None:
        headers = {} if retry_after is None else {"Retry-After": _retry_after(retry_after)}
        if not retry:
            headers["x-should-retry"] = "false"
        super().__init__(message, code=code, headers=headers)


def _retry_after(seconds: int) -> str:
    return str(min(max(seconds, 1), MAX_RETRY_AFTER))


def quoted(value: object, limit: int = 64) -> str:
    """A value from outside as it may appear in a message: its `repr`, of bounded length and encodable."""
    value = str(value) if isinstance(value, PurePath) else value
    text = value[: limit + 1] if isinstance(value, str) else value
    shown = repr(text).encode("ascii", "backslashreplace").decode("ascii")
    return shown if len(shown) <= limit else f"{shown[:limit]}..."
