"""Documents without facts, cut from token pools or made on the spot."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.recall import fiction, records, unseen
from training.recall.codec import Codec
from training.recall.vocabulary import Lexicon

# `prose` and `code` come from installed packages (`training/corpus.py`), `tongues`, `lines` and
# `tales` from `training/invented.py`; the rest is made here.
TRAINING_MIX = {
    "prose": 0.16,
    "story": 0.18,
    "code": 0.11,
    "records": 0.10,
    "tongues": 0.10,
    "lines": 0.12,
    "tales": 0.09,
    "scripts": 0.03,
    "noise": 0.07,
    "random": 0.04,
}
GENERATED_MIX = {"story": 0.5, "records": 0.25, "noise": 0.25}
UNSEEN_MIX = {"foreign": 0.25, "novel": 0.25, "logs": 0.2, "program": 0.2, "unseen_noise": 0.1}

GENERATORS: dict[str, Callable[[random.Random, Lexicon], Iterator[str]]] = {
    "story": lambda rng, _: fiction.paragraphs(rng),
    "records": records.blocks,
    "scripts": lambda rng, _: records.scripts(rng),
    "foreign": unseen.foreign,
    "novel": unseen.novel,
    "program": unseen.program,
    "logs": unseen.logs,
}
_NOISE = {"noise": fiction.NOISE, "unseen_noise": unseen.NOISE}
_SPARE = 256  # tokens within which a cut of a pool looks for the beginning of a line


def tokenized(texts: Iterator[str], tokenizer: Tokenizer, size: int) -> np.ndarray:
    """The first `size` tokens of the texts joined by blank lines, uint32; fewer if the texts hold fewer."""
    pieces, total = [np.empty(0, np.uint32)], 0
    while total < size and (batch := list(itertools.islice(texts, 64))):
        for encoding in tokenizer.encode_batch([text.strip("\n") + "\n\n" for text in batch], add_special_tokens=False):
            pieces.append(np.array(encoding.ids, np.uint32))
            total += len(encoding.ids)
    return np.concatenate(pieces)[:size]


@dataclass(frozen=True)
class Filler:
    """Token pools (integer arrays by name) and how often each kind of text is drawn."""

    codec: Codec
    pools: Mapping[str, np.ndarray]
    mix: Mapping[str, float]

    @classmethod
    def load(cls, directory: Path, codec: Codec, mix: Mapping[str, float]) -> Filler:
        """The pools that `training.corpus` wrote into a directory."""
        with np.load(directory / "pools.npz") as file:
            return cls(codec, {kind: file[kind] for kind in mix if kind in file}, mix)

    @classmethod
    def build(cls, codec: Codec, mix: Mapping[str, float], tokens: int, seed: int) -> Filler:
        """Pools of `tokens` tokens each, made now."""
        lexicon = Lexicon()
        pools = {
            kind: tokenized(GENERATORS[kind](random.Random(f"{seed} {kind}"), lexicon), codec.tokenizer, tokens)
            for kind in mix
            if kind in GENERATORS
        }
        return cls(codec, pools, mix)

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
            ordinary = self.codec.ordinary
            return ordinary[np.random.default_rng(rng.getrandbits(32)).integers(0, len(ordinary), size)]
        if kind in _NOISE:
            return self._repeated(rng, size, _NOISE[kind])
        pool = self.pools[kind]
        if size + _SPARE > len(pool):
            raise ValueError(f"pool {kind!r} has {len(pool)} tokens, {size} are wanted: build it with more tokens")
        start = rng.randrange(len(pool) - size - _SPARE + 1)
        breaks = np.flatnonzero(self.codec.ends_line[pool[start : start + _SPARE]])
        start += int(breaks[0]) + 1 if len(breaks) else 0
        return pool[start : start + size].astype(np.int64)

    def _repeated(self, rng: random.Random, size: int, sentences: tuple[str, ...]) -> np.ndarray:
        """A few sentences over and over, as in the simplest needle tests."""
        if sentences is fiction.NOISE and rng.random() < 0.5:
            chosen = [next(fiction.paragraphs(rng))]
        else:
            chosen = rng.sample(sentences, rng.randint(1, min(5, len(sentences))))
        joint = rng.choice((" ", " ", "\n"))
        start, unit = self.codec.encode(joint.join(chosen)), self.codec.encode(joint + joint.join(chosen))
        return np.concatenate([start, np.tile(unit, size // len(unit) + 1)])[:size]
