"""The thin application in front of the replicas: keys, the body's limits, the choice of a replica, and the way back.

Ray Serve's HTTP proxy knows a request's path but not its prompt, so a deployment of its own reads the body before a
replica is chosen. What a replica sends is passed on as it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longreach.api.app import cors_options
from longreach.api.endpoints.playground import page_files
from longreach.api.http.auth import OPEN_PATHS, ApiKeys
from longreach.api.http.error_answers import as_api_error, error_response
from longreach.api.http.error_forms import id_headers, speaks_anthropic
from longreach.api.http.request_checks import Door
from longreach.api.http.request_log import request_id_from
from longreach.api.http.sse import ANTHROPIC_STREAM, OPENAI_STREAM
from longreach.cluster.forwarded import Forwarded
from longreach.cluster.merged_metrics import merge
from longreach.cluster.prompt_key import PromptKey, prompt_key
from longreach.config import Settings
from longreach.errors import (
    AuthenticationError,
    BodyTooLargeError,
    OverloadedError,
    RequestTimeoutError,
    UnavailableError,
)
from longreach.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)

# For a replica to take a request. While one is replaced requests wait; a model takes longer to load than callers do.
_TAKEN_SECONDS = 30.0
_DECLINED_SECONDS = 0.5
_SCRAPE_SECONDS = 5.0
_RETRY_SECONDS = 2
# A stream has a comment every `--keep-alive-seconds`: a replica that misses so many is gone, though no socket says so.
_MISSED_COMMENTS = 6
_LONG_BYTES = 64 * 1024
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")


def create_ingress(settings: Settings, replicas: DeploymentHandle) -> ASGIApp:
    """The ingress of one application; `replicas` is the handle of their deployment.

    Raises:
        ConfigError: the API keys cannot be used.
    """
    app: ASGIApp = Ingress(settings, replicas)
    if settings.allowed_origins is not None:
        app = CORSMiddleware(app, **cors_options(settings.allowed_origins))
    # Serve's proxy puts the request's own id on every answer.
    return Door(app, settings, refused=lambda record: record.log(log), echoes_id=False)


class Ingress:
    """See the module. An ASGI application without routes: replicas know what each path means."""

    def __init__(self, settings: Settings, replicas: DeploymentHandle) -> None:
        self._settings = settings
        self._replicas = replicas
        self._answer = replicas.options(stream=True, method_name="answer")
        self._keys = ApiKeys.of(settings)
        page = page_files() if settings.playground else {}
        self._open_paths = OPEN_PATHS | {path.encode() for path in page}
        self._silence_seconds = max(_MISSED_COMMENTS * settings.keep_alive_seconds, _TAKEN_SECONDS)
        self._bodies = 0  # bytes of the bodies of all open requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        headers = dict(scope["headers"])
        request_id = request_id_from(headers.get(b"x-request-id"))
        answer = _Answer(send, request_id, adds_id=headers.get(b"x-request-id") != request_id.encode())
        with contextlib.ExitStack() as at_end:
            try:
                raw_path = scope.get("raw_path") or scope["path"].encode()
                self._authenticate(raw_path, headers)
                body = await self._read(headers, receive, at_end)
                if raw_path == b"/metrics" and scope["method"] in ("GET", "HEAD"):
                    await self._metrics()(scope, receive, send)
                    return
                forwarded = await self._forwarded(scope, raw_path, request_id, headers, body)
                del body
                await self._pass_on(forwarded, answer)
            except ClientDisconnect:
                log.debug("id=%s finish=disconnected", request_id)
            except Exception as error:  # noqa: BLE001 - the last resort: whatever happens, the caller reads an end
                await answer.fail(_told(error, request_id), scope, receive)

    def _authenticate(self, raw_path: bytes, headers: dict[bytes, bytes]) -> None:
        if self._keys and raw_path not in self._open_paths and self._keys.find(headers) is None:
            raise AuthenticationError

    async def _read(self, headers: dict[bytes, bytes], receive: Receive, at_end: contextlib.ExitStack) -> bytes:
        """The body, which counts towards `--max-total-body-bytes` until `at_end` is closed."""
        settings = self._settings
        limit = settings.body_limit(settings.max_model_len)
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLargeError(limit)
        body = bytearray()
        held = 0

        def release() -> None:
            self._bodies -= held

        at_end.callback(release)
        try:
            async with asyncio.timeout(settings.body_timeout):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunk = message.get("body", b"")
                    held += len(chunk)
                    self._bodies += len(chunk)
                    body += chunk
                    if len(body) > limit:
                        raise BodyTooLargeError(limit)
                    if self._bodies > settings.max_total_body_bytes:
                        raise OverloadedError(
                            "The server is busy: the bodies of its open requests take all the memory that they may.",
                            retry_after=_RETRY_SECONDS,
                            code="too_many_bytes",
                        )
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RequestTimeoutError("body", settings.body_timeout) from None
        return bytes(body)

    async def _forwarded(
        self, scope: Scope, raw_path: bytes, request_id: str, headers: dict[bytes, bytes], body: bytes
    ) -> Forwarded:
        salt = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        if not body:
            key = PromptKey()
        elif len(body) > _LONG_BYTES:
            key = await asyncio.to_thread(prompt_key, body, salt)
        else:
            key = prompt_key(body, salt)
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        others = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        plain |= {"raw_path": raw_path, "headers": [*others, (b"x-request-id", request_id.encode())]}
        return Forwarded(plain, body, key)

    async def _pass_on(self, forwarded: Forwarded, answer: _Answer) -> None:
        """Send what a replica answers. Leaving this early, as when the caller goes away, cancels it there."""
        try:
            async with asyncio.timeout(_TAKEN_SECONDS):
                response = await self._taken(forwarded)
        except TimeoutError:
            message = "No replica takes requests at this moment."
            raise UnavailableError(message, code="no_replica", retry_after=_RETRY_SECONDS) from None
        finished = False
        try:
            async for message in self._flowing(aiter(response), answer):
                await answer.send(message)
            finished = True
        finally:
            if not finished:
                response.cancel()

    async def _taken(self, forwarded: Forwarded) -> Any:
        """The response of the first replica that takes a request, behind the message that says so."""
        while True:
            response: Any = self._answer.remote(forwarded)  # a generator: the handle's type does not say so
            try:
                first = await anext(aiter(response))
            except BaseException:
                response.cancel()
                raise
            if not first:
                return response
            name = first[0]["replica"]
            if name in forwarded.declined:  # so have all others that there are
                await asyncio.sleep(_DECLINED_SECONDS)
            forwarded = replace(forwarded, declined=forwarded.declined | {name})

    async def _flowing(self, messages: AsyncIterator[list[Message]], answer: _Answer) -> AsyncIterator[Message]:
        """The messages one by one. A stream that falls silent for longer than its comments can is an error."""
        while True:
            try:
                async with asyncio.timeout(self._silence_seconds if answer.streams else None):
                    batch = await anext(messages, None)
            except TimeoutError:
                raise _lost() from None
            if batch is None:
                return
            for message in batch:
                yield message

    async def _merged(self) -> bytes:
        scrapes = await self._replicas.broadcast("metrics").results_async(
            timeout_s=_SCRAPE_SECONDS, return_exceptions=True
        )
        gone = [scrape for scrape in scrapes if isinstance(scrape, BaseException)]
        if gone:
            log.warning("no metrics from %d replicas: %s", len(gone), gone[0])
        return merge(dict(scrape for scrape in scrapes if not isinstance(scrape, BaseException)))

    def _metrics(self) -> ASGIApp:
        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            await Response(await self._merged(), media_type=CONTENT_TYPE)(scope, receive, send)

        return respond


class _Answer:
    """What has been sent to a caller, so that an error finds its place behind it.

    Serve's proxy gives every request an id and puts it on the answer; ours is added only where it is another
    (`adds_id`).
    """

    def __init__(self, send: Send, request_id: str, *, adds_id: bool) -> None:
        self._send = send
        self._request_id = request_id
        self._adds_id = adds_id
        self.started = False
        self.streams = False

    async def send(self, message: Message) -> None:
        """Pass on one message."""
        if message["type"] == "http.response.start":
            self.started = True
            media_type = next((value for name, value in message["headers"] if name == b"content-type"), b"")
            self.streams = media_type.startswith(b"text/event-stream")
            if not self._adds_id:
                kept = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": kept}
        await self._send(message)

    async def fail(self, error: Exception, scope: Scope, receive: Receive) -> None:
        """Tell of an error: as the answer, or as the last event of a stream. Half of any other answer is cut off."""
        api_error = as_api_error(error, self._request_id)
        if not self.started:
            response = error_response(api_error, scope, self._request_id)
            if self._adds_id:
                response.raw_headers += id_headers(scope, self._request_id)
            await response(scope, receive, self._send)
        elif self.streams:
            form = ANTHROPIC_STREAM if speaks_anthropic(scope) else OPENAI_STREAM
            last = form.failure(api_error, self._request_id) + form.end
            await self._send({"type": "http.response.body", "body": last})
        else:
            raise error


def _told(error: Exception, request_id: str) -> Exception:
    """What an error of Ray's is to the caller."""
    if isinstance(error, BackPressureError):
        return OverloadedError("The server is busy: no replica has room.", _RETRY_SECONDS)
    if isinstance(error, DeploymentUnavailableError):
        return UnavailableError("The replicas cannot be started.", code="no_replica")
    if isinstance(error, RayError):
        log.warning("request %s lost its replica: %s", request_id, type(error).__name__)
        return _lost()
    return error


def _lost() -> UnavailableError:
    # As with an engine that dies: what it died of may be this request.
    message = "The replica that had this request has stopped; the request cannot be finished."
    return UnavailableError(message, code="replica_lost", retry=False)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
