"""The model's tokenizer, without torch or transformers: `tokenizer.json` and what `tokenizer_config.json` adds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import tokenizers
from tokenizers import AddedToken

from longreach.errors import TokenizerError
from longreach.text.detokenizer import Detokenizer, TokenBytes
from longreach.text.files import model_file


class Tokenizer:
    """Encodes prompts and makes detokenizers; loaded by `Tokenizer.load`.

    A beginning-of-sequence token is added where the model's own tokenizer adds one. Special tokens that are written in
    a prompt's text are read as such.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A file saved while training may hold limits that would silently cut or fill up prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._token_bytes = TokenBytes(backend)
        self._all_token_bytes = TokenBytes(backend, special=True)

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """Read the tokenizer of a model directory or hub id.

        Raises:
            TokenizerError: there is no fast tokenizer, it is broken, or its decoder cannot be streamed.
        """
        path = model_file(model, "tokenizer.json")
        if path is None:
            raise TokenizerError(
                f"{model} has no tokenizer.json; write one with "
                "transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)"
            )
        config_path = model_file(model, "tokenizer_config.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            config = {} if config_path is None else json.loads(config_path.read_text("utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"the tokenizer of {model} cannot be read: {error}") from error
        _add_declared_tokens(backend, config)
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token's name, if it is one."""
        return self._backend.token_to_id(token)

    async def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a prompt, computed in a thread without the GIL: a book does not stall the event loop.

        `special`: with the tokens that the model's tokenizer puts around a text.
        """
        return await asyncio.to_thread(self.encode_here, text, special)

    def encode_here(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a prompt, computed in the calling thread."""
        # Not `encode`: it holds the GIL throughout, and keeps offsets that nobody reads.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=special)
        return encoding.ids

    def detokenizer(self, special: bool = False) -> Detokenizer:
        """A detokenizer for one answer; `special`: special tokens have text, too."""
        return Detokenizer(self._all_token_bytes if special else self._token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself; special tokens are their names."""
        return self._all_token_bytes[token_id]


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that only `tokenizer_config.json` declares.

    As in transformers, its `add_bos_token` and `add_eos_token` do not count beside a `tokenizer.json`, whose
    post-processor says what surrounds a prompt.
    """
    declared = sorted((int(id_), token) for id_, token in config.get("added_tokens_decoder", {}).items())
    for id_, token in declared:
        if backend.token_to_id(token["content"]) is None:
            flags = {name: value for name, value in token.items() if isinstance(value, bool) and name != "special"}
            added = AddedToken(token["content"], **flags)
            (backend.add_special_tokens if token.get("special", False) else backend.add_tokens)([added])
        if backend.token_to_id(token["content"]) != id_:
            raise TokenizerError(f"tokenizer_config.json and tokenizer.json disagree about the token with id {id_}")
