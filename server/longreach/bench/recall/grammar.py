"""Phrasings without end: statements, questions and records from a grammar, so that none can be learnt by heart.

The rules are data, in `tables/grammar.toml` and, for items of several statements, `tables/compound_grammar.toml`.
Fixed words are now and then dropped, replaced or added to: what a model may rely on is the key, the relation, and what
looks like a value beside them.
"""

import random
import re
from bisect import bisect
from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any

from .tables import load
from .vocabulary import Lexicon

_NAME = re.compile(r"\$(\w+)")


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

        def replace(match: re.Match[str]) -> str:
            name = match[1]
            if chosen and name in chosen:
                return chosen[name]
            if name == "word":
                return lexicon.word(rng)
            if name == "words":
                return " ".join(lexicon.word(rng) for _ in range(rng.randint(1, 5)))
            weights = self.weights[name]  # what rng.choices does, in a third of the time
            alternative = self.texts[name][bisect(weights, rng.random() * weights[-1], 0, len(weights) - 1)]
            result = self.expand(rng, alternative, lexicon, chosen, anew) if "$" in alternative else alternative
            if chosen is not None and name not in anew:
                chosen[name] = result
            return result

        return _NAME.sub(replace, text)


_GRAMMAR = Grammar(load("grammar") | load("compound_grammar"))


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
    text = _GRAMMAR.expand(rng, "$statement" if keyed else "$keyless_statement", lexicon)
    return rough(rng, sentence(text), lexicon, 0.2)


def question(rng: random.Random, lexicon: Lexicon, *, keyed: bool = True) -> str:
    """A question, request or keyword query for a relation, at times without its mark or its capital."""
    text = sentence(_GRAMMAR.expand(rng, "$question" if keyed else "$keyless_question", lexicon))
    if rng.random() < 0.1:
        text = text.rstrip("?.! ")
    if rng.random() < 0.1 and not text.startswith("{"):
        text = text[:1].lower() + text[1:]
    return rough(rng, text, lexicon, 0.2)


def stem(rng: random.Random, lexicon: Lexicon, *, keyed: bool = True) -> str:
    """The beginning of an answer's sentence, up to the value."""
    return sentence(_GRAMMAR.expand(rng, "$stem" if keyed else "$keyless_stem", lexicon))


def record(rng: random.Random, lexicon: Lexicon) -> str:
    """A line of a file that pairs a key with a value."""
    return _GRAMMAR.expand(rng, "$record", lexicon)


def record_question(rng: random.Random, lexicon: Lexicon) -> str:
    """A question for the value of a record."""
    return rough(rng, sentence(_GRAMMAR.expand(rng, "$record_question", lexicon)), lexicon, 0.15)


def compound_statement(rng: random.Random, rule: str, lexicon: Lexicon) -> str:
    """A piece of an item of several statements, by a rule of `tables/compound_grammar.toml`; its fields stay as they
    are.
    """
    text = rough(rng, _GRAMMAR.expand(rng, f"${rule}", lexicon), lexicon, 0.15)
    return text[:1].upper() + text[1:] if rng.random() < 0.8 else text


def reference(rng: random.Random, lexicon: Lexicon) -> str:
    """How one variable stands for the value of another, {o}."""
    return _GRAMMAR.expand(rng, "$reference", lexicon)


def compound_question(rng: random.Random, rule: str, lexicon: Lexicon) -> str:
    """A question about an item of several statements, at times without its mark or its capital."""
    text = interrupted(rng, _GRAMMAR.expand(rng, f"${rule}", lexicon), lexicon, 0.2)
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
