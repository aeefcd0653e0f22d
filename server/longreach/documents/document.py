"""A document as a value: what its owner asked for, and what has come of it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from longreach.policies.values import AttentionPolicy

Kind = Literal["text", "messages", "tokens"]
Use = Literal["chat", "completion"]
State = Literal["uploading", "reading", "ready", "failed"]

# The same document under its own name, and as one of OpenAI's files.
PREFIX, FILE_PREFIX = "doc-", "file-"


def new_id() -> str:
    """An id that nobody can guess."""
    return PREFIX + uuid.uuid4().hex


def is_id(reference: str) -> bool:
    """Whether a reference is an id, and no name."""
    return reference.startswith((PREFIX, FILE_PREFIX))


def own_id(reference: str) -> str:
    """The id of a document in the store, for it or for that of its file."""
    return PREFIX + reference.removeprefix(FILE_PREFIX) if reference.startswith(FILE_PREFIX) else reference


def file_id(document_id: str) -> str:
    """The id of a document as one of OpenAI's files."""
    return FILE_PREFIX + document_id.removeprefix(PREFIX)


def salt_of(owner: str, own: str) -> str:
    """The prefix cache's salt of an owner's requests with the salt `own`; as `ApiKey.salt`."""
    return f"{owner}/{own}" if owner else own


@dataclass(frozen=True, kw_only=True)
class NewDocument:
    """What an owner asks for.

    Attributes:
        kind: what the contents are: UTF-8 text, a JSON list of messages, or token ids (little-endian int32).
        use: where it is to be used, which decides what is read ahead of it.
        name: what the owner calls it; several may have one name.
        ttl: seconds until it expires; None for the server's, or for none where it is pinned.
        renews: `ttl` counts from the last use, and not from the beginning.
        pinned: it makes no room for others.
        cache_salt: the owner's own part of the prefix cache's salt.
        attention: the policy under which it is read; None for the server's.
        tokenizer: digest of the tokenizer whose ids the contents are; empty for other kinds.
        metadata: whatever else its owner keeps with it.
    """

    kind: Kind
    use: Use
    name: str | None = None
    ttl: float | None = None
    renews: bool = True
    pinned: bool = False
    cache_salt: str = ""
    attention: AttentionPolicy | None = None
    tokenizer: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Document(NewDocument):
    """A document that is kept. Times are seconds since 1970.

    Attributes:
        owner: the key's digest in hex; empty where there are no keys.
        state: `uploading` until its last byte has come, `reading` until the engine has read it once, `ready`, or
            `failed`.
        problem: why it failed.
        used: when it was last used, or came.
        uses: requests that have referred to it.
        expires: None for never.
        bytes: of its contents.
        tokens: of the prompt prefix that is read ahead; None before that is known.
        digest: SHA-256 of its contents in hex; empty until all of them have come.
    """

    id: str
    owner: str
    state: State
    problem: str | None
    created: float
    used: float
    uses: int
    expires: float | None
    bytes: int
    tokens: int | None
    digest: str

    @property
    def salt(self) -> str:
        """The prefix cache's salt under which it is read."""
        return salt_of(self.owner, self.cache_salt)
