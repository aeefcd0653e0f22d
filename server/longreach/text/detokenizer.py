"""Token ids to text, one token at a time, without ever splitting a character.

Both kinds of tokenizer that language models use are concatenative: a token stands for the same bytes wherever it
follows another token. So a token is mapped to its bytes, and the bytes run through one incremental UTF-8 decoder, which
holds back an incomplete character and replaces invalid bytes as the WHATWG standard says (as `str.decode` and Rust's
`from_utf8_lossy` do).

- Byte-level BPE (Llama 3, Qwen, GPT-2): each character of a token is one byte in the GPT-2 alphabet. The text equals
  `Tokenizer.decode` of all ids for any bytes.
- SentencePiece-like (Llama 2, Mistral, Gemma): pieces with U+2581 for a space, and `<0xNN>` tokens for bytes. The
  text continues the prompt, so its first space stays, which a decode of the answer alone would strip. In a run of byte
  tokens that is not valid UTF-8, valid characters are kept; `Tokenizer.decode` gives U+FFFD for each byte of the run.

`tokenizers.decoders.DecodeStream` is not used: it re-decodes a growing window while text is invalid, raises when a
finished character is followed by an invalid byte token, and has no way to flush what it holds at the end.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import tokenizers

from longreach.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONCATENATIVE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenBytes:
    """The bytes that each token id adds to a text. Unknown ids add none, special tokens their names only if `special`.

    Raises:
        TokenizerError: the tokenizer's decoder is not concatenative.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: bool = False) -> None:
        self._backend = backend
        self._special = {
            id_: token.content.encode() if special else b""
            for id_, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._known: dict[int, bytes] = {}
        steps = _decoder_steps(backend)
        kinds = {step["type"] for step in steps}
        self._byte_level = kinds == {"ByteLevel"}
        self._byte_fallback = "ByteFallback" in kinds
        if self._byte_level:
            self._byte_of = {character: byte for byte, character in byte_alphabet().items()}
            return
        trailing = any(step["type"] == "Strip" and step["stop"] for step in steps)
        if not kinds <= _CONCATENATIVE or trailing:
            raise TokenizerError(
                f"the tokenizer's decoder ({', '.join(sorted(kinds))}) cannot be streamed; supported are byte-level "
                "BPE and SentencePiece-like decoders (Replace, ByteFallback, Fuse, Strip at the start, Metaspace)"
            )
        self._anchor, self._anchor_text = self._find_anchor()

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes_of(token_id)
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special."""
        return token_id in self._special

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._special:
            return self._special[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # A token with a character outside the alphabet was added as plain text.
            values = [self._byte_of.get(character) for character in token]
            plain = [value for value in values if value is not None]
            return bytes(plain) if len(plain) == len(values) else token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        text = self._backend.decode([self._anchor, token_id], skip_special_tokens=False)
        assert text.startswith(self._anchor_text), f"token {token_id} changes the token before it"
        return text.removeprefix(self._anchor_text).encode()

    def _find_anchor(self) -> tuple[int, str]:
        """A plain token to put in front, so that rules for the first token of a text do not apply to the second."""
        for token, id_ in self._backend.get_vocab(with_added_tokens=False).items():
            if token.isascii() and token.isalnum() and (text := self._backend.decode([id_])):
                return id_, text
        raise TokenizerError("the tokenizer has no token of ASCII letters or digits")


class Detokenizer:
    """The text of one answer, piece by piece: the pieces and the `flush` together are the whole text."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty in the middle of a character."""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """The answer has ended: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        raise TokenizerError("the tokenizer has no decoder, so its tokens cannot be joined to text")
    described = json.loads(backend.decoder.__getstate__())
    return described["decoders"] if described["type"] == "Sequence" else [described]


def byte_alphabet() -> dict[int, str]:
    """GPT-2's bijection from bytes to printable characters: printable Latin-1 stays, the rest moves past U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {byte: chr(byte) for byte in printable}
    moved = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + i) for i, byte in enumerate(moved)}
