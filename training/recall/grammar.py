"""Phrasings without end: statements, questions and records from a grammar, so that none can be learnt by heart.

The rules are data, in `tables/grammar.toml` and, for items of several statements, `tables/compound_grammar.toml`,
which `tables/hard_grammar.toml` adds to where a document is hard.
Fixed words are now and then dropped, replaced or added to: what a model may rely on is the key, the relation, and what
looks like a value beside them.
"""

import random
import re
from bisect import bisect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from itertools import accumulate
from typing import Any

from training.recall.tables import load
from training.recall.vocabulary import Lexicon

_NAME = re.compile(r"\$(\w+)")


@cache
def _parts(text: str) -> tuple[str, ...]:
    """What stands between names, and the names: every second one is one."""
    return tuple(_NAME.split(text))


class Grammar:
    """A context-free grammar over strings: rules by name, each a tuple of alternatives with weights.

    Raises ValueError where a rule refers to a name that is neither a rule nor one of `given`.
    """

    def __init__(self, rules: Mapping[str, list[Any]], given: tuple[str, ...] = ()) -> None:
        self.texts: dict[str, list[str]] = {}
        self.weights: dict[str, list[float]] = {}  # cumulative
        for name, alternatives in rules.items():
            pairs = [(1, a) if isinstance(a, str) else a for a in alternatives]
            self.weights[name] = list(accumulate(weight for weight, _ in pairs))
            self.texts[name] = [text for _, text in pairs]
        known = {*self.texts, *given, "word", "words"}
        for name, texts in self.texts.items():
            for text in texts:
                if unknown := set(_NAME.findall(text)) - known:
                    raise ValueError(f"rule {name!r} uses {sorted(unknown)}, which no rule defines: add the rules")

    def expand(
        self,
        rng: random.Random,
        text: str,
        lexicon: Lexicon,
        chosen: dict[str, str] | None = None,
        anew: Collection[str] = (),
    ) -> str:
        """`text` with every `$name` replaced by one of its rule's alternatives, expanded.

        With `chosen`, a name in it stands for what it holds, and a name that comes up is kept in it, except those in
        `anew`.
        """

        parts = _parts(text)
        if len(parts) == 1:
            return text
        result = list(parts)
        for i in range(1, len(parts), 2):
            result[i] = self._one(rng, parts[i], lexicon, chosen, anew)
        return "".join(result)

    def _one(
        self, rng: random.Random, name: str, lexicon: Lexicon, chosen: dict[str, str] | None, anew: Collection[str]
    ) -> str:
        if chosen and name in chosen:
            return chosen[name]
        if name == "word":
            return lexicon.word(rng)
        if name == "words":
            return " ".join([lexicon.word(rng) for _ in range(rng.randint(1, 5))])
        weights = self.weights[name]  # what rng.choices does, in a third of the time
        alternative = self.texts[name][bisect(weights, rng.random() * weights[-1], 0, len(weights) - 1)]
        result = self.expand(rng, alternative, lexicon, chosen, anew)
        if chosen is not None and name not in anew:
            chosen[name] = result
        return result


_RULES = load("grammar") | load("compound_grammar")
_GRAMMAR = Grammar(_RULES)
_HARD = Grammar(_RULES | {name: _RULES[name] + more for name, more in load("hard_grammar").items()})


def _bare(template: str) -> str:
    """What tells a template from others: no capitals, no mark at the end, one name for all that is assigned."""
    return re.sub(r"{[vo]}", "{x}", template.lower()).rstrip("?.! ")


def _held_out() -> frozenset[str]:
    """What training must not say: the held-out templates of all tables."""
    phrasings, compound = load("phrasings"), load("compound")
    tables = [phrasings, *compound.values()]
    return frozenset(_bare(t) for table in tables for name in table if name.startswith("held_out") for t in table[name])


_HELD_OUT = _held_out()


def _new(draw: Callable[[], str]) -> str:
    """A phrase that holds none of the held-out templates."""
    while True:
        text = draw()
        if not _says_held_out(_bare(text)):
            return text


def _says_held_out(bare: str) -> bool:
    for template in _HELD_OUT:  # noqa: SIM110 - `any` takes twice as long
        if template in bare:
            return True
    return False


def sentence(text: str) -> str:
    """With a capital at the beginning; a field there becomes its capitalised form."""
    text = re.sub(r"^{(k|ks)}", lambda match: "{" + match[1].capitalize() + "}", text)
    return text[:1].upper() + text[1:]


def rough(rng: random.Random, template: str, lexicon: Lexicon, share: float) -> str:
    """The template itself, or in `share` of the cases one with a few fixed words dropped, replaced or added to."""
    if rng.random() >= share:
        return template
    words = []
    for word in template.split(" "):
        draw = rng.random()
        if "{" in word or draw < 0.75:
            words.append(word)
        elif draw < 0.83:
            words.append(lexicon.word(rng))
        elif draw < 0.92:
            words += [word, lexicon.word(rng)]
    return " ".join(words)


def interrupted(rng: random.Random, template: str, lexicon: Lexicon, share: float) -> str:
    """The template itself, or in `share` of the cases one with up to three more words in it: `rough` could take away
    what tells the first of several values from the last.
    """
    if rng.random() >= share:
        return template
    words = template.split(" ")
    for _ in range(rng.randint(1, 3)):
        words.insert(rng.randint(0, len(words) - 1), lexicon.word(rng))
    return " ".join(words)


def statement(rng: random.Random, lexicon: Lexicon, *, keyed: bool = True) -> str:
    """A statement of a relation; without `keyed` it names no key."""
    rule = "$statement" if keyed else "$keyless_statement"
    return _new(lambda: rough(rng, sentence(_GRAMMAR.expand(rng, rule, lexicon)), lexicon, 0.2))


def question(rng: random.Random, lexicon: Lexicon, *, keyed: bool = True) -> str:
    """A question, request or keyword query for a relation, at times without its mark or its capital."""

    def draw() -> str:
        text = sentence(_GRAMMAR.expand(rng, "$question" if keyed else "$keyless_question", lexicon))
        if rng.random() < 0.1:
            text = text.rstrip("?.! ")
        if rng.random() < 0.1 and not text.startswith("{"):
            text = text[:1].lower() + text[1:]
        return rough(rng, text, lexicon, 0.2)

    return _new(draw)


def stem(rng: random.Random, lexicon: Lexicon, *, keyed: bool = True) -> str:
    """The beginning of an answer's sentence, up to the value."""
    return sentence(_GRAMMAR.expand(rng, "$stem" if keyed else "$keyless_stem", lexicon))


def record(rng: random.Random, lexicon: Lexicon) -> str:
    """A line of a file that pairs a key with a value."""
    return _new(lambda: _GRAMMAR.expand(rng, "$record", lexicon))


def record_question(rng: random.Random, lexicon: Lexicon) -> str:
    """A question for the value of a record."""
    return _new(lambda: rough(rng, sentence(_GRAMMAR.expand(rng, "$record_question", lexicon)), lexicon, 0.15))


def compound_statement(rng: random.Random, rule: str, lexicon: Lexicon, *, hard: bool = False) -> str:
    """A piece of an item of several statements, by a rule of `tables/compound_grammar.toml`; its fields stay as they
    are.
    """
    rules = _HARD if hard else _GRAMMAR
    text = _new(lambda: rough(rng, rules.expand(rng, f"${rule}", lexicon), lexicon, 0.15))
    return text[:1].upper() + text[1:] if rng.random() < 0.8 else text


def reference(rng: random.Random, lexicon: Lexicon) -> str:
    """How one variable stands for the value of another, {o}."""
    return _GRAMMAR.expand(rng, "$reference", lexicon)


def compound_question(rng: random.Random, rule: str, lexicon: Lexicon, *, hard: bool = False) -> str:
    """A question about an item of several statements, at times without its mark or its capital."""
    rules = _HARD if hard else _GRAMMAR
    text = _new(lambda: interrupted(rng, rules.expand(rng, f"${rule}", lexicon), lexicon, 0.2))
    if rng.random() < 0.1:
        text = text.rstrip("?.! ")
    return text[:1].upper() + text[1:] if rng.random() < 0.9 else text


def dressed(rng: random.Random, text: str, lexicon: Lexicon) -> str:
    """A question with words before or after it now and then, its capital or its mark missing at times."""
    if rng.random() < 0.1:
        text = text.rstrip("?.! ")
    before = _GRAMMAR.expand(rng, "$before", lexicon)
    if before or (rng.random() < 0.08 and not text.startswith("{")):
        text = text[:1].lower() + text[1:]
    after = _GRAMMAR.expand(rng, "$afterthought", lexicon)
    return sentence(before + text) + ("" if "{" in after else after)


def refrain(rng: random.Random, lexicon: Lexicon) -> str:
    """A sentence of any words with a name {k} and a word {w} in it, for text that repeats itself.

    As long as the sentences of made-up text came once each, a trained model answered with words that stood behind a key
    in a sentence that it had read hundreds of times with other names.
    """
    words = [lexicon.word(rng) for _ in range(rng.randint(5, 18))]
    for at in rng.sample(range(1, len(words) - 1), len(words) // 5):
        words[at] += rng.choice(",,,;:")
    words.insert(rng.randrange(len(words)), "{k}")
    words.insert(rng.randrange(len(words)), "{w}")
    return " ".join(words) + rng.choice("...!?")
