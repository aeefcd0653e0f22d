"""Prompts with facts in them, questions about the facts, and the answers: what the model is trained and tested on.

A prompt is filler text with statements at any depth, then one or more questions. Its form is one of

- chat: the question closes the user's turn of the chat template;
- bare: plain text that ends with the question, or with the question and a line break;
- cue: plain text that ends with `Answer:` or the like;
- stem: plain text that ends with the beginning of the answer's sentence;

and any form may carry an instruction before or after the document. The answer is the value alone, then the
end-of-sequence token.
"""

import random
from dataclasses import dataclass

import numpy as np

from training import phrasings as p
from training.facts import Drawer, Fact, Phrasing
from training.filler import Codec, Filler
from training.forms import ENDINGS, FORMS, SEPARATORS
from training.tokenizer import ASSISTANT_ID, BOS_ID, EOS_ID, USER_ID
from training.vocabulary import Lexicon

NEAR = 200  # tokens that a statement may move to stand at the end of a sentence or line


@dataclass(frozen=True)
class Spec:
    """What to draw: `length` in tokens, answers included; `depth` in [0, 1] of the first question's fact."""

    length: int
    facts: int
    questions: int
    form: str | None = None
    depth: float | None = None
    phrasing: Phrasing = "mixed"
    absent: float = 0.025  # the share of questions about something that the document does not state
    turns: int = 1  # document parts, each followed by some of the questions


@dataclass(frozen=True)
class Question:
    """One question of a sample; its answer's tokens are `ids[start:end]`, the last of them the end of sequence."""

    text: str
    form: str
    answer: str
    fact: Fact | None  # None where the document does not state the answer
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """`ids` (length,) int64; `target` and `lead` (length,) bool mark answer tokens and the first of each that says
    something.
    """

    ids: np.ndarray
    target: np.ndarray
    lead: np.ndarray
    questions: tuple[Question, ...]
    spans: tuple[tuple[Fact, int, int], ...]  # where each statement stands in `ids`

    def prompt(self, codec: Codec) -> str:
        """The text before the first answer, special tokens written out."""
        return codec.decode(self.ids[: self.questions[0].start])


class _Assembly:
    """Token sequences put one after another, with notes of where answers and statements came to stand."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.pieces: list[np.ndarray] = []
        self.size = 0
        self.questions: list[Question] = []
        self.spans: list[tuple[Fact, int, int]] = []

    def add(self, ids: np.ndarray) -> None:
        self.pieces.append(ids)
        self.size += len(ids)

    def finish(self) -> Sample:
        ids = np.concatenate(self.pieces)
        target, lead = np.zeros(len(ids), bool), np.zeros(len(ids), bool)
        for question in self.questions:
            target[question.start : question.end] = True
            lead[question.start] = True
            if self.codec.blank[ids[question.start]]:
                lead[question.start + 1] = True
        return Sample(ids, target, lead, tuple(self.questions), tuple(self.spans))


@dataclass(frozen=True)
class _Asked:
    """A question ready to be appended: its tokens, and its answer's."""

    text: str
    form: str
    answer: str
    fact: Fact | None
    before: np.ndarray
    after: np.ndarray


class Sampler:
    """Draws samples from a filler and a lexicon; all randomness comes from the `rng` of each call."""

    def __init__(self, codec: Codec, filler: Filler, lexicon: Lexicon) -> None:
        self.codec, self.filler, self.lexicon = codec, filler, lexicon

    def draw(self, rng: random.Random, spec: Spec) -> Sample:
        """A sample of exactly `spec.length` tokens; with fewer facts and questions where they do not fit.

        Raises ValueError if not even one fact with its question fits into `spec.length`.
        """
        facts, questions = spec.facts, spec.questions
        for _ in range(30):
            sample = self._try(rng, spec, facts, questions)
            if sample is not None:
                return sample
            facts, questions = max(1, facts * 2 // 3), max(1, questions * 2 // 3)
        raise ValueError(f"length={spec.length} is too short for a fact and its question: use 256 or more")

    def _try(self, rng: random.Random, spec: Spec, n_facts: int, n_questions: int) -> Sample | None:
        drawer = Drawer(rng, self.lexicon, spec.phrasing)
        facts = [drawer.fact() for _ in range(n_facts)]
        statements: list[tuple[Fact | None, str, bool]] = [(fact, fact.statement, fact.line) for fact in facts]
        if rng.random() < 0.3:
            statements += [
                (None, drawer.mention(rng.choice(facts)), False)
                for _ in range(rng.randint(1, 1 + n_facts // 3))
                if facts[0].key or facts[0].relation
            ]

        form = spec.form or rng.choices(FORMS, (0.3, 0.33, 0.25, 0.12))[0]
        turns = min(spec.turns, n_questions)
        per_turn: list[list[tuple[Fact | None, str, bool]]] = [[] for _ in range(turns)]
        for statement in statements:
            per_turn[0 if rng.random() < 0.3 else rng.randrange(turns)].append(statement)
        if not any(fact for fact, _, _ in per_turn[0]):
            per_turn[0].append(next(s for turn in per_turn for s in turn if s[0]))
            for turn in per_turn[1:]:
                if per_turn[0][-1] in turn:
                    turn.remove(per_turn[0][-1])

        asked: list[list[_Asked]] = []
        known: list[Fact] = []
        for number, turn in enumerate(per_turn):
            known += [fact for fact, _, _ in turn if fact]
            count = n_questions // turns + (number < n_questions % turns)
            asked.append(
                [
                    self._ask(rng, spec, form, drawer, known, first=i == 0 and number == 0, opening=i == 0)
                    for i in range(count)
                ]
            )

        opening = self._opening(rng, spec, form)
        placed = [[self._placed(rng, text, line) for _, text, line in turn] for turn in per_turn]
        fixed = (
            len(opening)
            + sum(len(ids) for turn in placed for ids in turn)
            + sum(len(q.before) + len(q.after) for turn in asked for q in turn)
        )
        fixed += turns - 1 if form == "chat" else 0
        room = spec.length - fixed
        if room < 8 * turns:
            return None

        cuts = sorted(rng.randrange(room + 1) for _ in range(turns - 1))
        assembly = _Assembly(self.codec)
        assembly.add(opening)
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, room], strict=True)):
            if number and form == "chat":
                assembly.add(np.array([USER_ID]))
            first = asked[0][0].fact if number == 0 else None
            self._document(rng, assembly, per_turn[number], placed[number], end - start, first, spec.depth)
            for question in asked[number]:
                assembly.add(question.before)
                begin = assembly.size
                assembly.add(question.after)
                assembly.questions.append(
                    Question(question.text, question.form, question.answer, question.fact, begin, assembly.size)
                )
        return assembly.finish()

    def _opening(self, rng: random.Random, spec: Spec, form: str) -> np.ndarray:
        """The beginning of the prompt: special tokens, and in a third of the prompts an instruction."""
        marks = [BOS_ID] if rng.random() < 0.92 or spec.form else rng.choice(([], [BOS_ID, BOS_ID]))
        marks = [*marks, USER_ID] if form == "chat" else marks
        text = ""
        if rng.random() < 0.4:
            text = rng.choice(p.HELD_OUT_INSTRUCTIONS if spec.phrasing == "held_out" else p.INSTRUCTIONS) + rng.choice(
                ("\n", "\n\n", "\n\n", " ")
            )
        return np.concatenate([np.array(marks, np.int64), self.codec.encode(text)])

    def _ask(
        self,
        rng: random.Random,
        spec: Spec,
        form: str,
        drawer: Drawer,
        known: list[Fact],
        *,
        first: bool,
        opening: bool,
    ) -> _Asked:
        """One question about a known fact, or about one that is nowhere stated; `opening` if a document stands right
        before it.
        """
        fact: Fact | None = rng.choice(known)
        about = fact
        if rng.random() < spec.absent and not (first and spec.depth is not None):
            fact, about = None, drawer.fact()
        assert about is not None
        text = rng.choice(about.questions)
        stem = rng.choice(about.stems) if about.stems else ""
        endings = ENDINGS[form] if form != "stem" or stem else ENDINGS["cue"]
        ending, gap = rng.choice(endings)
        body = ending.format(q=text, s=stem)
        if rng.random() < 0.15 and not ending.startswith("{s}"):
            body = (
                rng.choice(p.HELD_OUT_CLOSING if spec.phrasing == "held_out" else p.CLOSING)
                + rng.choice(("\n", "\n", " ", "\n\n"))
                + body
            )
        answer = about.value if fact else p.NOT_STATED
        if form == "chat":
            before = (
                [self.codec.encode(rng.choice(SEPARATORS) + body)]
                if opening
                else [np.array([USER_ID]), self.codec.encode(body)]
            )
            before.append(np.array([ASSISTANT_ID]))
        else:
            before = [self.codec.encode((rng.choice(SEPARATORS) if opening else rng.choice(("\n", "\n\n"))) + body)]
        after = np.concatenate([self.codec.encode(gap + answer), np.array([EOS_ID])])
        return _Asked(text, form, answer, fact, np.concatenate(before), after)

    def _placed(self, rng: random.Random, text: str, line: bool) -> np.ndarray:
        """The statement as it goes into the text, with the white space around it."""
        if line or rng.random() < 0.2:
            left, right = (rng.choice(("\n", "")), "\n")
        elif rng.random() < 0.2:
            left, right = ("\n\n", "\n\n")
        else:
            left, right = (" ", "")
        return self.codec.encode(left + text + right)

    def _document(
        self,
        rng: random.Random,
        assembly: _Assembly,
        statements: list[tuple[Fact | None, str, bool]],
        placed: list[np.ndarray],
        size: int,
        first: Fact | None,
        depth: float | None,
    ) -> None:
        """Filler of `size` tokens with the statements in it, mostly between sentences, at uniform depths; `first` at
        `depth` if given.
        """
        text = self.filler.document(rng, size)
        lines = np.flatnonzero(self.codec.ends_line[text]) + 1
        sentences = np.flatnonzero(self.codec.ends_sentence[text][:-1] & self.codec.opens_gap[text][1:]) + 1
        order = []
        for (fact, _, line), ids in zip(statements, placed, strict=True):
            cut = rng.choice((0, size)) if rng.random() < 0.06 else rng.randrange(size + 1)
            if depth is not None and fact is not None and fact is first:
                cut = round(depth * size)
            ends = lines if len(lines) and (line or ids[-1] == self.codec.newline) else sentences
            if 0 < cut < size and len(ends) and (line or rng.random() < 0.9):
                near = int(ends[np.abs(ends - cut).argmin()])
                cut = near if abs(near - cut) < NEAR else cut
            order.append((cut, rng.random(), fact, ids))
        position = 0
        for cut, _, fact, ids in sorted(order, key=lambda item: item[:2]):
            assembly.add(text[position:cut])
            position = cut
            if fact is not None:
                assembly.spans.append((fact, assembly.size, assembly.size + len(ids)))
            assembly.add(ids)
        assembly.add(text[position:])


def training_spec(rng: random.Random, length: int) -> Spec:
    """A draw of the training distribution: one to 64 facts, as many questions as fit well, some asked midway."""

    def log_uniform(most: int) -> int:
        return min(most, int((most + 1) ** rng.random()))

    facts = log_uniform(max(2, min(64, length // 40)))
    questions = rng.randint(1, max(2, min(64, length // 64)))
    return Spec(length, facts, questions, turns=rng.choice((1, 1, 1, 2, 3)))
