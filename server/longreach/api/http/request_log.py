"""What is known of one HTTP request while it runs, and the one line that the log keeps of it."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import re
import time
import uuid
from dataclasses import dataclass, field

from longreach.api.http.auth import ApiKey
from longreach.api.schema.answers.usage import PartedPrompt, SentencePlaces
from longreach.engine.updates import AttentionUse, DecodeUse

_PLAIN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_DIGEST_CHARACTERS = 16
# A line of one blank is no field of an event and no empty line: no reader in use counts it as the end of an event, and
# one that strips what it reads before it joins it has nothing left of it.
_SILENT_LINE = b" \n"


@dataclass(frozen=True)
class ComparedPrompt:
    """A prompt beside the nearest of its caller's recent ones: first tokens that are `seen` there, and where it parts
    from it."""

    seen: int
    parted: PartedPrompt | None


@dataclass
class RequestRecord:
    """What one request has come to so far. Its methods say what happened, and only they change it.

    Nothing in it comes from the prompt's text, but for `compared`, of which the log has numbers alone, and `places`, of
    which it has nothing. All times are
    those of `time.monotonic`, in seconds.

    Attributes:
        address: where the request came from, as `network_of` has it.
        asker: whom the request says that it is from, as a word of the log.
        document: the id of the kept document that the prompt begins with.
        deadline_ms, predicted: when the first token is due, and the seconds that were predicted before it was queued.
        finish: how the request ended: stop, length, disconnected, or the code of an error.
        attention: what each prompt was computed with, unless that was dense.
        compared: the prompt beside the caller's recent ones, if the caller asks for that.
        decode: what each answer has read so far under a decode budget, by its request to the engine.
        rope_factor: the largest factor of its prompts' rotary tables; 0 where there are none.
        places: of each answer what its sentences attended to, by its number; None if nobody asks.
        at_end: what is left to do when the request has ended, however that was.
    """

    request_id: str
    method: str
    path: str
    address: str = ""
    started: float = field(default_factory=time.monotonic)
    status: int | None = field(default=None, init=False)
    key: ApiKey | None = field(default=None, init=False)
    asker: str | None = field(default=None, init=False)
    document: str | None = field(default=None, init=False)
    completion_id: str | None = field(default=None, init=False)
    prompt_tokens: int | None = field(default=None, init=False)
    computed_tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    host_tokens: int = field(default=0, init=False)
    disk_tokens: int = field(default=0, init=False)
    compared: ComparedPrompt | None = field(default=None, init=False)
    output_tokens: int = field(default=0, init=False)
    first_token: float | None = field(default=None, init=False)
    deadline_ms: int | None = field(default=None, init=False)
    predicted: float | None = field(default=None, init=False)
    finish: str | None = field(default=None, init=False)
    attention: list[AttentionUse] = field(default_factory=list, init=False)
    decode: dict[str, DecodeUse] = field(default_factory=dict, init=False)
    rope_factor: float = field(default=0.0, init=False)
    places: dict[int, list[SentencePlaces]] | None = field(default=None, init=False)
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)
    _shows_progress: bool = field(default=False, init=False)
    _compiling: set[str] = field(default_factory=set, init=False)
    _read: dict[str, tuple[int, int, int, int]] = field(default_factory=dict, init=False)

    @property
    def caller(self) -> str:
        """Who shares what the server has to give: the key's name, else the address."""
        return self.address if self.key is None else self.key.name

    @property
    def owner(self) -> str:
        """Whose the request is, as what it leaves behind is marked: the key's digest. Empty where there are no keys."""
        return "" if self.key is None else self.key.digest.hex()

    def authenticated(self, key: ApiKey | None) -> None:
        """The request came with this key, or without a valid one."""
        self.key = key

    def asked_by(self, name: str | None) -> None:
        """The request says that it is from `name`; what is too long or too odd for the log is told by a digest."""
        if name is not None and _PLAIN.fullmatch(name) is None:
            name = f"sha256:{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:_DIGEST_CHARACTERS]}"
        self.asker = name

    def reads_document(self, document_id: str) -> None:
        """The prompt begins with this kept document, or the request is about it."""
        self.document = document_id

    def answering(self, completion_id: str, prompt_tokens: int) -> None:
        """Answers to so many prompt tokens are wanted, and are to be sent under this id."""
        self.completion_id, self.prompt_tokens = completion_id, prompt_tokens

    def progressed(self, engine_request_id: str, computed: int, cached: int, host: int = 0, disk: int = 0) -> None:
        """So many tokens of one prompt have been computed; so many of them were found in the cache, and of these so
        many were brought back from host memory and from disk."""
        self._read[engine_request_id] = (computed, cached, host, disk)
        totals = map(sum, zip(*self._read.values(), strict=True))
        self.computed_tokens, self.cached_tokens, self.host_tokens, self.disk_tokens = totals

    def compiles(self, engine_request_id: str, *, compiling: bool) -> None:
        """Whether an answer waits for kernels to be compiled."""
        (self._compiling.add if compiling else self._compiling.discard)(engine_request_id)

    def due(self, deadline_ms: int, predicted: float | None) -> None:
        """The first token is due so long after the request came, and is predicted in so many seconds from now."""
        self.deadline_ms, self.predicted = deadline_ms, predicted

    def stretched(self, rope_factor: float) -> None:
        """Its prompts' rotary tables have this factor at most; 0 where there are none."""
        self.rope_factor = rope_factor

    def compare(self, compared: ComparedPrompt) -> None:
        """The caller is to be told what was cached, and why no more was."""
        self.compared = compared

    def wants_places(self) -> None:
        """The caller is to be told what the answers attended to."""
        self.places = {}

    def placed(self, choice: int, places: list[SentencePlaces]) -> None:
        """The sentences of an answer attended to these places."""
        assert self.places is not None, "nobody asked"
        self.places[choice] = places

    def attended(self, engine_request_id: str, prompt: AttentionUse | None, answer: DecodeUse | None) -> None:
        """A prompt was computed under a policy, or an answer has read so much; None where there is no news."""
        if prompt is not None:
            self.attention.append(prompt)
        if answer is not None:
            self.decode[engine_request_id] = answer

    def add_token(self) -> None:
        """Count a generated token."""
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.output_tokens += 1

    def answered(self, status: int) -> None:
        """The head of the response has been sent."""
        self.status = status

    def finished(self, reason: str | None) -> None:
        """The request has come to its end. The first reason that is given stays."""
        if self.finish is None:
            self.finish = reason

    def disconnected(self) -> None:
        """The caller went away."""
        self.finished("disconnected")

    def show_progress(self) -> None:
        """The caller reads the stream's comments."""
        self._shows_progress = True

    def keep_alive(self) -> bytes:
        """What a silent stream sends: a line that says nothing, or a comment with the progress if that is wanted."""
        if not self._shows_progress:
            return _SILENT_LINE
        if self._compiling:
            return b": compiling\n"
        if self.output_tokens:
            return f": decode {self.output_tokens}\n".encode()
        return f": prefill {self.computed_tokens}/{self.prompt_tokens}\n".encode()

    def cache_salt(self, given: str) -> str:
        """The salt of the prefix cache: what the request gives, within its key."""
        return given if self.key is None else self.key.salt(given)

    def line(self) -> str:
        """The log line; bounded, since each of its words is."""
        return _line(self.fields())

    def fields(self) -> dict[str, str | int | float | None]:
        """What the line says, by name; times in seconds."""
        said: dict[str, str | int | float | None] = {
            "id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
        }
        named = {"key": self.key and self.key.name, "user": self.asker, "document": self.document}
        said |= {name: value for name, value in named.items() if value is not None}
        if self.completion_id is not None:
            said |= {
                "completion": self.completion_id,
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "output": self.output_tokens,
            }
            if self.compared is not None:
                said |= self._of_cache(self.compared)
            if self.first_token is not None:
                said["ttft"] = _rounded(self.first_token - self.started)
        if self.deadline_ms is not None:
            said["deadline"] = _rounded(self.deadline_ms / 1000)
            said |= {} if self.predicted is None else {"predicted": _rounded(self.predicted)}
        said["total"] = _rounded(time.monotonic() - self.started)
        if self.finish is not None:
            said["finish"] = self.finish
        return said

    def log(self, logger: logging.Logger, level: int = logging.INFO) -> None:
        """Write the line to a log, which has its fields by name, too."""
        fields = self.fields()
        logger.log(level, "%s", _line(fields), extra={"request": fields})

    def _of_cache(self, compared: ComparedPrompt) -> dict[str, str | int]:
        said: dict[str, str | int] = {"host": self.host_tokens, "disk": self.disk_tokens, "seen": compared.seen}
        if (parted := compared.parted) is not None:
            said["parted"] = parted.token
            said |= {} if parted.message is None else {"message": parted.message}
            said |= {} if parted.field is None else {"field": parted.field}
        return said


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def _line(fields: dict[str, str | int | float | None]) -> str:
    rest = {name: value for name, value in fields.items() if name not in ("id", "method", "path")}
    words = [f"id={fields['id']}", f"{fields['method']} {fields['path']}"]
    return " ".join(words + [f"{name}={_word(value)}" for name, value in rest.items()])


def _word(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}s" if isinstance(value, float) else str(value)


def request_id_from(header: bytes | None) -> str:
    """The caller's `X-Request-Id` if it is short and plain enough to be echoed and logged, else a fresh one."""
    given = "" if header is None else header.decode("latin-1")
    return given if _PLAIN.fullmatch(given) else uuid.uuid4().hex


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
