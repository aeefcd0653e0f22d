"""The tokenizer as the tasks use it: token arrays, and where a sequence may be cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

BOS, EOS, USER, ASSISTANT, PAD = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT, PAD)


class Codec:
    """A tokenizer with what the splicing of token sequences needs to know of each token.

    `ends_sentence`, `ends_line`, `opens_gap` and `blank` are bool arrays over the vocabulary: the token ends a sentence
    or a line; it ends a line; it begins with white space; it is white space. `comma` is the id of a comma, -1 if it has
    none; `bos`, `eos`, `user` and `assistant` hold the ids of the embedded model's special tokens, () where the
    tokenizer lacks one: such a prompt is plain text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
        self.size = len(pieces)
        self.ends_sentence = np.array([piece.endswith((".", "!", "?", "\n", '."', '?"')) for piece in pieces])
        self.ends_line = np.array([piece.endswith("\n") for piece in pieces])
        self.opens_gap = np.array([piece[:1].isspace() for piece in pieces])
        self.blank = np.array([piece.isspace() for piece in pieces])
        self.comma = next((i for i, piece in enumerate(pieces) if piece == ","), -1)
        self.bos, self.eos, self.user, self.assistant = (self._mark(t) for t in (BOS, EOS, USER, ASSISTANT))
        self.ordinary = np.array([i for i, piece in enumerate(pieces) if piece not in SPECIAL_TOKENS], np.int64)

    @classmethod
    def load(cls, directory: Path) -> Codec:
        """The tokenizer of a model directory.

        Raises:
            ValueError: it has no tokenizer.json.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{directory} has no tokenizer.json; name a model directory that has one")
        return cls(Tokenizer.from_file(str(path)))

    @property
    def chats(self) -> bool:
        """Whether the chat template of the embedded model can be written with these tokens."""
        return bool(self.user and self.assistant)

    def encode(self, text: str) -> np.ndarray:
        """Token ids (n,) int64 of `text`, no special tokens added."""
        return np.array(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int64)

    def decode(self, ids: np.ndarray) -> str:
        """Text of `ids`, special tokens written out."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _mark(self, token: str) -> tuple[int, ...]:
        found = self.tokenizer.token_to_id(token)
        return () if found is None else (found,)
