"""Documents without facts, cut from token pools or made on the spot, and where a sentence may be put into them."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training import corpus, fiction
from training.tokenizer import SPECIAL_TOKENS
from training.vocabulary import Lexicon

TRAINING_MIX = {
    "prose": 0.30,
    "story": 0.25,
    "code": 0.12,
    "records": 0.12,
    "scripts": 0.05,
    "noise": 0.12,
    "random": 0.04,
}
ORDINARY_MIX = {"prose": 0.5, "story": 0.5}
HELD_OUT_MIX = {
    "held_out_prose": 0.3,
    "held_out_story": 0.25,
    "held_out_code": 0.15,
    "held_out_records": 0.1,
    "held_out_noise": 0.2,
}


class Codec:
    """The tokenizer with what the splicing of token sequences needs to know of each token.

    `ends_sentence` and `opens_gap` are bool arrays over the vocabulary: the token ends a sentence or a line; it
    begins with white space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
        self.size = len(pieces)
        self.newline = pieces.index("\n")
        self.ends_sentence = np.array([piece.endswith((".", "!", "?", "\n", '."', '?"')) for piece in pieces])
        self.ends_line = np.array([piece.endswith("\n") for piece in pieces])
        self.opens_gap = np.array([piece[:1].isspace() for piece in pieces])
        self.blank = np.array([piece.isspace() for piece in pieces])

    def encode(self, text: str) -> np.ndarray:
        """Token ids (n,) int64 of `text`, no special tokens added."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: np.ndarray) -> str:
        """Text of `ids`, special tokens written out."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


@dataclass(frozen=True)
class Filler:
    """Token pools (uint16 arrays by name) and how often each kind of text is drawn."""

    codec: Codec
    pools: Mapping[str, np.ndarray]
    mix: Mapping[str, float]

    @classmethod
    def load(cls, directory: Path, codec: Codec, mix: Mapping[str, float]) -> "Filler":
        """The pools of a directory that `training.corpus` wrote."""
        return cls(
            codec,
            {kind: np.load(directory / f"{kind}.npy") for kind in mix if (directory / f"{kind}.npy").exists()},
            mix,
        )

    @classmethod
    def build(cls, codec: Codec, mix: Mapping[str, float], tokens: int, seed: int) -> "Filler":
        """Pools of `tokens` tokens each, made now from what is installed."""
        made = [kind for kind in mix if not kind.endswith(("noise", "random"))]
        return cls(
            codec, {kind: corpus.pool_tokens(kind, codec.tokenizer, Lexicon(), tokens, seed) for kind in made}, mix
        )

    def document(self, rng: random.Random, size: int) -> np.ndarray:
        """`size` tokens of one kind of text, or of two to four kinds in turn; int64."""
        parts = 1 if rng.random() < 0.6 else rng.randint(2, 4)
        cuts = sorted(rng.randrange(size + 1) for _ in range(parts - 1))
        kinds = rng.choices(list(self.mix), list(self.mix.values()), k=parts)
        ends = [*cuts, size]
        return np.concatenate(
            [self._take(rng, kind, end - start) for kind, start, end in zip(kinds, [0, *cuts], ends, strict=True)]
        )

    def _take(self, rng: random.Random, kind: str, size: int) -> np.ndarray:
        if kind == "random":
            return np.random.default_rng(rng.getrandbits(32)).integers(len(SPECIAL_TOKENS), self.codec.size, size)
        if kind.endswith("noise"):
            return self._repeated(rng, size, fiction.HELD_OUT_NOISE if kind.startswith("held_out") else fiction.NOISE)
        pool = self.pools[kind]
        if size + 256 > len(pool):
            raise ValueError(f"pool {kind!r} has {len(pool)} tokens, {size} are wanted: build it with more tokens")
        start = rng.randrange(len(pool) - size - 256 + 1)
        breaks = np.flatnonzero(self.codec.ends_line[pool[start : start + 256]])
        start += int(breaks[0]) + 1 if len(breaks) else 0
        return pool[start : start + size].astype(np.int64)

    def _repeated(self, rng: random.Random, size: int, sentences: tuple[str, ...]) -> np.ndarray:
        if sentences is fiction.NOISE and rng.random() < 0.5:
            chosen = [next(fiction.paragraphs(rng))]
        else:
            chosen = rng.sample(sentences, rng.randint(1, min(5, len(sentences))))
        joint = rng.choice((" ", " ", "\n"))
        start, unit = self.codec.encode(joint.join(chosen)), self.codec.encode(joint + joint.join(chosen))
        return np.concatenate([start, np.tile(unit, size // len(unit) + 1)])[:size]
