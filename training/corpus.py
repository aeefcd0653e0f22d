"""Filler text: prose and code of installed packages under licences that allow it, and generated text.

    python -m training.corpus .scratch/corpus

writes the token pools that training reads, the word list, the tokenizer, and `training/corpus.json`: what was read,
under which licence, how much of it, and a digest. The text itself is never committed.
"""

import argparse
import ast
import hashlib
import io
import itertools
import json
import platform
import random
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from training import tokenizer as bpe
from training.invented import INVENTED
from training.model import MAX_LENGTH
from training.recall.filler import GENERATORS, tokenized
from training.recall.vocabulary import Lexicon

SEED = 20260101
MANIFEST = Path(__file__).with_name("corpus.json")


@dataclass(frozen=True)
class Source:
    """A package whose installed files are read; `name` as imported, or `python` for the standard library."""

    name: str
    licence: str
    folders: tuple[str, ...] = ("",)

    @property
    def version(self) -> str:
        return platform.python_version() if self.name == "python" else metadata.version(self.name)

    def files(self) -> list[Path]:
        """Its Python files in name order, without tests and vendored code."""
        if self.name == "python":
            root = Path(sysconfig.get_paths()["stdlib"])
        else:
            spec = find_spec(self.name)
            if spec is None or spec.origin is None:
                raise ValueError(f"source {self.name!r} is not installed: install the dev extra, then run again")
            root = Path(spec.origin).parent
        skip = {
            "site-packages",
            "test",
            "tests",
            "idle_test",
            "_vendor",
            "vendored",
            "third_party",
            "lib2to3",
            "encodings",
            "idlelib",
            "turtledemo",
        }
        paths = sorted(p for folder in self.folders for p in (root / folder).rglob("*.py"))
        return [p for p in paths if not skip & set(p.relative_to(root).parts)]


TRAINING_SOURCES = (
    Source("python", "PSF-2.0"),
    Source("torch", "BSD-3-Clause", ("",)),
    Source("transformers", "Apache-2.0"),
    Source("sympy", "BSD-3-Clause"),
    Source("numpy", "BSD-3-Clause"),
    Source("pydantic", "MIT"),
    Source("fastapi", "MIT"),
)

POOLS = {
    "prose": 4_000_000,
    "code": 2_000_000,
    "story": 1_500_000,
    "records": 2_000_000,
    "scripts": 400_000,
    "tongues": 1_500_000,
    "lines": 1_500_000,
    "tales": 1_500_000,
}
MADE = {**GENERATORS, **INVENTED}
OF_WORDS = ("records", "lines", "tales")  # every second text of these has the words of the short lists alone


def _is_notice(text: str) -> bool:
    return bool(re.search(r"licen[sc]e|copyright|generated from|do not edit", text, re.IGNORECASE))


def _prose_of(source: str) -> Iterator[str]:
    """Docstrings and comment paragraphs of one file, unindented."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 80 and not _is_notice(text):
                yield text
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and len(node.value) > 2000
            and " the " in node.value
        ):
            yield node.value  # long texts kept as data, such as the language reference
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines.append(token.string.lstrip("#! "))
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            text = " ".join(lines)
            if len(text) > 120 and not _is_notice(text):
                yield text
            lines = []


def _code_of(source: str) -> Iterator[str]:
    body = re.sub(r"\A(?:[ \t]*#[^\n]*\n|\s*\n)+", "", source)  # licence headers
    if body.strip():
        yield body


def texts(source: Source, kind: str, rng: random.Random) -> Iterator[str]:
    """Texts of one source in a seeded order, each once: `kind` is `prose` or `code`."""
    paths = source.files()
    rng.shuffle(paths)
    seen: set[bytes] = set()
    for path in paths:
        try:
            content = path.read_text(encoding="utf-8")
            found = list(_prose_of(content) if kind == "prose" else _code_of(content))
        except (UnicodeDecodeError, SyntaxError, tokenize.TokenError):
            continue  # a few files are broken on purpose, as data for their package
        for text in found:
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            if digest not in seen:
                seen.add(digest)
                yield text


def _round_robin(streams: list[Iterator[str]]) -> Iterator[str]:
    """Texts of each stream in turn, so that a large package does not crowd out the others."""
    while streams:
        alive = []
        for stream in streams:
            chunk = list(itertools.islice(stream, 8))
            yield from chunk
            if len(chunk) == 8:
                alive.append(stream)
        streams = alive


def stream(pool: str, lexicon: Lexicon, seed: int = SEED) -> Iterator[str]:
    """The texts of one pool, a name of `POOLS`, in a seeded order."""
    rng = random.Random(f"{seed} {pool}")
    if pool in ("prose", "code"):
        return _round_robin([texts(source, pool, rng) for source in TRAINING_SOURCES])
    return MADE[pool](rng, lexicon)


def pool_texts(pool: str, lexicon: Lexicon) -> Iterator[str]:
    """The texts of one pool as training reads them: of words from the corpus and of those that facts are tested with,
    in turn, so that the words of a fact stand in the text around it, too.
    """
    if pool not in OF_WORDS:
        return stream(pool, lexicon)
    return _round_robin([stream(pool, lexicon), stream(pool, Lexicon(), SEED + 1)])


def common_words(texts_: list[str]) -> tuple[str, ...]:
    """Lower-case words of 4 to 11 letters that occur at least 4 times, in alphabetical order."""
    counts = Counter(word for text in texts_ for word in re.findall(r"(?<![\w])[a-z]{4,11}(?![\w])", text))
    return tuple(sorted(word for word, n in counts.items() if n >= 4))


def main() -> None:
    """Write tokenizer, word list, pools and manifest."""
    parser = argparse.ArgumentParser(description="make the filler text")
    parser.add_argument("directory", type=Path, help="where the pools go (ignored by git)")
    out: Path = parser.parse_args().directory
    out.mkdir(parents=True, exist_ok=True)

    prose = list(itertools.islice(stream("prose", Lexicon()), 40_000))
    lexicon = Lexicon(common_words(prose))
    (out / "words.txt").write_text("\n".join(lexicon.extra) + "\n")
    sample = prose[:12_000]
    for pool, count in (("story", 12_000), ("code", 300), ("records", 300), ("scripts", 20)):
        sample += itertools.islice(stream(pool, lexicon), count)
    bpe.save(bpe.build(sample), out / "tokenizer", MAX_LENGTH)
    tokenizer = bpe.load(out / "tokenizer")

    pools = {
        pool: tokenized(pool_texts(pool, lexicon), tokenizer, size).astype(np.uint16) for pool, size in POOLS.items()
    }
    np.savez_compressed(out / "pools.npz", **pools)
    manifest = {
        "seed": SEED,
        "sources": [
            {"name": s.name, "version": s.version, "licence": s.licence, "files": len(s.files())}
            for s in TRAINING_SOURCES
        ],
        "generated": [pool for pool in POOLS if pool in MADE],
        "pools": {
            pool: {"tokens": len(ids), "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
            for pool, ids in pools.items()
        },
        "tokenizer_sha256": hashlib.sha256((out / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest(),
        "words": len(lexicon.extra),
    }
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
