"""Made-up text: without end, the same for the same seed, and each block of a kind of its own."""

import itertools
import random
import re

import pytest

from training.corpus import MADE, POOLS
from training.invented import INVENTED
from training.recall.filler import TRAINING_MIX
from training.recall.vocabulary import Lexicon


def _blocks(kind: str, seed: int, count: int = 40) -> list[str]:
    return list(itertools.islice(INVENTED[kind](random.Random(seed), Lexicon(("fulcrum", "gantry"))), count))


@pytest.mark.parametrize("kind", INVENTED)
def test_text_is_a_function_of_the_seed(kind: str) -> None:
    assert _blocks(kind, 1) == _blocks(kind, 1) != _blocks(kind, 2)
    assert all(len(block) > 20 for block in _blocks(kind, 3))


def test_languages_change() -> None:
    words = [set(re.findall(r"\w+", text.lower())) for text in _blocks("tongues", 4, 60)]
    shared = [len(a & b) / min(len(a), len(b)) for a, b in itertools.pairwise(words)]
    assert max(shared) > 0.5  # a language is used for a while
    assert sum(share < 0.2 for share in shared) >= 6  # and dropped


def test_lines_of_a_block_have_few_shapes() -> None:
    for block in _blocks("lines", 5):
        assert "{" not in block
        lines = block.split("\n")
        assert len({line[: len(line) - len(line.lstrip())] for line in lines}) <= 3
        assert 10 <= len(lines) <= 80


def test_every_kind_of_training_text_has_a_pool_or_is_made_on_the_spot() -> None:
    assert set(TRAINING_MIX) == {*POOLS, "noise", "random"}
    assert set(POOLS) - set(MADE) == {"prose", "code"}
    assert sum(TRAINING_MIX.values()) == pytest.approx(1)
