"""What is known of one HTTP request while it runs, and the one line that the log keeps of it."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import time
import uuid
from dataclasses import dataclass, field

from longreach.api.http.auth import ApiKey
from longreach.engine.messages import AttentionUse, DecodeUse

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass
class RequestRecord:
    """Filled in by whoever learns something; nothing in it comes from the prompt's text.

    `address` is where the request came from, as `network_of` has it.
    `finish` is how a generation ended: stop, length, disconnected, or the code of an error. `attention` is what its
    prompts were computed with, unless that was dense, and `decode` what each answer has read so far under a decode
    budget, by its request to the engine. `at_end` is what is left to do when the request has ended,
    however that was.
    """

    request_id: str
    method: str
    path: str
    address: str = ""
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    key: ApiKey | None = None
    completion_id: str | None = None
    prompt_tokens: int | None = None
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    finish: str | None = None
    attention: list[AttentionUse] = field(default_factory=list)
    decode: dict[str, DecodeUse] = field(default_factory=dict)
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _parts: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def caller(self) -> str:
        """Who shares what the server has to give: the key's name, else the address."""
        return self.address if self.key is None else self.key.name

    def progressed(self, part: str, computed: int, cached: int) -> None:
        """So many of the prompt tokens of one part of the request have been computed, and found in the cache."""
        self._parts[part] = (computed, cached)
        self.computed_tokens = sum(computed for computed, _ in self._parts.values())
        self.cached_tokens = sum(cached for _, cached in self._parts.values())

    def add_token(self) -> None:
        """Count a generated token."""
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.output_tokens += 1

    def progress(self) -> str:
        """How far the answer is, in the words of a keep-alive comment."""
        if self.output_tokens:
            return f"decode {self.output_tokens}"
        return f"prefill {self.computed_tokens}/{self.prompt_tokens}"

    def cache_salt(self, asked: str) -> str:
        """The salt of the prefix cache: what the request asked for, within its key."""
        return asked if self.key is None else self.key.salt(asked)

    def line(self) -> str:
        """The log line; bounded, since its parts are."""
        parts = [f"id={self.request_id}", f"{self.method} {self.path}", f"status={self.status or '-'}"]
        if self.key is not None:
            parts.append(f"key={self.key.name}")
        if self.completion_id is not None:
            parts += [
                f"completion={self.completion_id}",
                f"prompt={self.prompt_tokens}",
                f"cached={self.cached_tokens}",
                f"output={self.output_tokens}",
            ]
            if self.first_token is not None:
                parts.append(f"ttft={self.first_token - self.started:.3f}s")
        parts.append(f"total={time.monotonic() - self.started:.3f}s")
        if self.finish is not None:
            parts.append(f"finish={self.finish}")
        return " ".join(parts)


def request_id_from(header: bytes | None) -> str:
    """The caller's `X-Request-Id` if it is short and plain enough to be echoed and logged, else a fresh one."""
    given = "" if header is None else header.decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def network_of(client: tuple[str, int] | None) -> str:
    """The address of an ASGI `client` as that of one caller: in IPv6 its network of 64 bits, all of which is one
    machine's to use. Empty where there is none, as on a Unix socket."""
    host = "" if client is None else client[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
