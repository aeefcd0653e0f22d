"""What a request's prompt begins with, as a chain of digests that can be compared without keeping the text.

Two prompts that begin alike have the same first digests, so that the length of what they share is found by looking
digests up. They stand at marks that grow by a quarter: a long prompt has a few dozen, few enough to be told around, and
what is shared is known to a fifth. Blocks are bytes of the request's text: a router has no tokenizer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

BLOCK_BYTES = 512
# An estimate: for what a router compares, a factor that is the same for all replicas does not matter.
BYTES_PER_TOKEN = 4
# Where a prompt that nobody has seen goes is decided by its first bytes, so that routers agree without talking. They
# are enough to tell documents apart that follow one system prompt.
_ANCHOR_BLOCKS = 8

# In the order in which they stand in a prompt. Pages are shared only within one salt and attention policy.
_BEFORE = ("cache_salt", "attention", "instructions", "tools", "system")
_PROMPTS = ("prompt", "messages", "input")
_EMPTY = (b"null", b"false", b"0", b'""', b"[]", b"{}")


@dataclass(frozen=True)
class PromptKey:
    """A prompt as a router sees it.

    Attributes:
        chain: at each mark the digest, of 64 bits, of all full blocks of `BLOCK_BYTES` bytes up to it; see `marks`.
        anchor: a digest of the prompt's first bytes, of all of them if they are few.
        text_bytes: the prompt's length.
    """

    chain: tuple[int, ...] = ()
    anchor: int = 0
    text_bytes: int = 0

    @property
    def marks(self) -> list[int]:
        """The number of blocks behind each digest of the chain."""
        return marks(self.text_bytes // BLOCK_BYTES)

    @property
    def tokens(self) -> int:
        """The prompt's tokens, estimated."""
        return self.text_bytes // BYTES_PER_TOKEN

    def tokens_beyond(self, blocks: int) -> int:
        """The tokens behind the first `blocks` blocks, estimated."""
        return max(0, self.text_bytes - blocks * BLOCK_BYTES) // BYTES_PER_TOKEN


def marks(blocks: int) -> list[int]:
    """The numbers of blocks, up to `blocks`, at which a chain has digests: 1 to 8, and from there on steps of a
    quarter."""
    found, mark = [], 1
    while mark <= blocks:
        found.append(mark)
        mark += max(1, mark // 4)
    return found


def prompt_key(body: bytes, salt: bytes) -> PromptKey:
    """The key of a request's JSON body; `salt` is what else has to agree, such as the caller's API key.

    A body without a prompt has an empty key: whoever gets it says what is wrong with it.
    """
    try:
        text = _text(_members.decode(body))
    except (msgspec.DecodeError, RecursionError):
        return PromptKey()
    if not text:
        return PromptKey()
    digest = hashlib.blake2b(salt, digest_size=8).digest()
    blocks = len(text) // BLOCK_BYTES
    at, chain, anchor = set(marks(blocks)), [], 0
    for number in range(1, blocks + 1):
        block = text[(number - 1) * BLOCK_BYTES : number * BLOCK_BYTES]
        digest = hashlib.blake2b(block, digest_size=8, key=digest).digest()
        if number in at:
            chain.append(int.from_bytes(digest))
        if number <= _ANCHOR_BLOCKS:
            anchor = int.from_bytes(digest)
    if not chain:
        anchor = int.from_bytes(hashlib.blake2b(text, digest_size=8, key=digest).digest())
    return PromptKey(tuple(chain), anchor, len(text))


# The members are cut out and not decoded: whatever stands in them takes no memory here. Others are passed over.
_members = msgspec.json.Decoder(
    msgspec.defstruct("Members", [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in (*_BEFORE, *_PROMPTS)])
)


def _text(asked: Any) -> bytes:
    prompt = next((raw for name in _PROMPTS if (raw := bytes(getattr(asked, name))) not in _EMPTY), None)
    if prompt is None:
        return b""
    # A prompt's end must change nothing before it: as JSON, texts, messages and token ids all only grow at their end.
    return b",".join([*(bytes(getattr(asked, name)) for name in _BEFORE), prompt])
