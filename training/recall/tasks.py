"""Prompts with facts in them, questions about the facts, and the answers: what the embedded model is trained and
tested on, in the manner of RULER (Hsieh et al. 2024).

A prompt is filler text with statements at any depth, then one or more questions; it may go on after an answer with
more text and more questions. Its form is one of

- chat: the question closes the user's turn of the chat template;
- bare: plain text that ends with the question, or with the question and a line break;
- cue: plain text that ends with `Answer:` or the like;
- stem: plain text that ends with the beginning of the answer's sentence;

and any form may carry an instruction before or after the document, or the question itself before it. The answer is a
space, the value alone, then the end-of-sequence token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from training.recall import compound, grammar
from training.recall import phrasings as p
from training.recall import vocabulary as v
from training.recall.codec import Codec
from training.recall.documents import TASKS, compose, most_values
from training.recall.facts import FEW_CHARACTERS, FEW_IN_CHAINS, Drawer
from training.recall.filler import Filler
from training.recall.forms import EARLY, EARLY_CUES, ENDINGS, FORMS, SEPARATORS, gap
from training.recall.items import Item, Query, Statement
from training.recall.samples import Asked, Assembly, Forks, Placed, Sample, Spec
from training.recall.vocabulary import Lexicon

COMPOUNDS = (0.1, 0.45, 0.85)  # shares of items of several statements, in training
REDRAWS = 3  # of a question that was asked before: its answer stands there, and it teaches nothing
REFRAINS = 0.15  # share of hard documents
NEAR = 200  # tokens that a statement may move to stand at the end of a sentence or line


class Sampler:
    """Draws samples from a filler and a lexicon; all randomness comes from the `rng` of each call."""

    def __init__(self, codec: Codec, filler: Filler, lexicon: Lexicon) -> None:
        self.codec, self.filler, self.lexicon = codec, filler, lexicon

    def draw(self, rng: random.Random, spec: Spec) -> Sample:
        """A sample of exactly `spec.length` tokens; with fewer items and questions where they do not fit.

        Raises:
            ValueError: not even one item with its question fits into `spec.length`, or the form or task is unknown.
        """
        if spec.task is not None and spec.task not in TASKS:
            raise ValueError(f"task {spec.task!r} is unknown: use one of {', '.join(TASKS)}")
        if spec.form is not None and spec.form not in FORMS:
            raise ValueError(f"form {spec.form!r} is unknown: use one of {', '.join(FORMS)}")
        if spec.form == "chat" and not self.codec.chats:
            raise ValueError("form 'chat' needs a tokenizer with the embedded model's chat tokens: use bare or cue")
        size = 1.0
        for _ in range(12):
            sample = self._try(rng, spec, size)
            if sample is not None:
                return sample
            size *= 0.6
        raise ValueError(
            f"length={spec.length} is too short for a {spec.task or 'fact'} and its question: use 512 or more"
        )

    def _try(self, rng: random.Random, spec: Spec, size: float) -> Sample | None:
        """A sample with items and questions in number `size` of what is asked for, or None if they do not fit."""
        few = FEW_IN_CHAINS if spec.family == "chains" else FEW_CHARACTERS
        drawer = Drawer(rng, self.lexicon, spec.phrasing, few, hard=spec.hard)
        items = compose(drawer, spec, size)
        questions = max(1, int(spec.questions * size))
        form = spec.form or rng.choices(FORMS, (0.3 if self.codec.chats else 0, 0.33, 0.25, 0.12))[0]
        turns = min(spec.turns, questions)
        # The first item stands in the first part, so that there is something to ask about.
        where = [0, *(0 if rng.random() < 0.3 else rng.randrange(turns) for _ in items[1:])]

        asked: list[list[Asked]] = []
        for turn in range(turns):
            known = [item for item, part in zip(items, where, strict=True) if part <= turn]
            count = questions // turns + (turn < questions % turns)
            asked.append(
                [
                    self._ask(rng, spec, form, drawer, known, number=i if turn == 0 else None, opening=i == 0)
                    for i in range(count)
                ]
            )
        opening = self._opening(rng, spec, form, asked[0][0].opening)
        placed = [
            [
                Placed(item, s, self._spaced(rng, s))
                for item, part in zip(items, where, strict=True)
                if part == turn
                for s in item.statements
            ]
            for turn in range(turns)
        ]
        if spec.task is None and rng.random() < 0.3:
            placed[rng.randrange(turns)] += self._mentions(rng, drawer, items)
        if spec.hard and rng.random() < REFRAINS:
            placed[rng.randrange(turns)] += self._refrain(rng, spec.length, items)
        marks = turns - 1 if form == "chat" else 0
        fixed = len(opening) + marks + sum(len(s.ids) for part in placed for s in part)
        room = spec.length - fixed - sum(len(q.before) + len(q.after) for part in asked for q in part)
        while room < 8 * turns and len(most := max(asked, key=len)) > 1:
            dropped = most.pop()
            room += len(dropped.before) + len(dropped.after)
        if room < 8 * turns:
            return None

        cuts = sorted(rng.randrange(room + 1) for _ in range(turns - 1))
        assembly = Assembly(self.codec)
        assembly.add(opening)
        for turn, (start, end) in enumerate(zip([0, *cuts], [*cuts, room], strict=True)):
            if turn and form == "chat":
                assembly.add(np.array(self.codec.user))
            first = items[0] if turn == 0 else None
            self._document(rng, assembly, placed[turn], end - start, first, spec.depth)
            for question in asked[turn]:
                assembly.ask(question)
        return assembly.finish(Forks(self.codec, items))

    def _opening(self, rng: random.Random, spec: Spec, form: str, early: str) -> np.ndarray:
        """The beginning of the prompt: special tokens, and in some prompts an instruction or the question."""
        bos = self.codec.bos
        marks = bos if rng.random() < 0.92 or spec.task else rng.choice(((), bos + bos))
        marks += self.codec.user if form == "chat" else ()
        text = early
        if rng.random() < 0.4:
            instructions = p.HELD_OUT_INSTRUCTIONS if spec.phrasing == "held_out" else p.INSTRUCTIONS
            text = rng.choice(instructions) + rng.choice(("\n", "\n\n", "\n\n", " ")) + text
        return np.concatenate([np.array(marks, np.int64), self.codec.encode(text)])

    def _mentions(self, rng: random.Random, drawer: Drawer, items: Sequence[Item]) -> list[Placed]:
        """Sentences that name some items' keys or relations and state nothing."""
        named = [item for item in items if item.key or item.relation]
        statements = [
            Statement(drawer.mention(rng.choice(named))) for _ in range(rng.randint(1, 1 + len(named) // 3)) if named
        ]
        return [Placed(None, statement, self._spaced(rng, statement)) for statement in statements]

    def _refrain(self, rng: random.Random, length: int, items: Sequence[Item]) -> list[Placed]:
        """One sentence that says nothing over and over, each time with the key of an item or another name."""
        wording = grammar.refrain(rng, self.lexicon)
        keys = [item.key for item in items if item.key and item.relation]
        sung = []
        for _ in range(rng.randint(2, max(2, min(60, length // 150)))):
            key = rng.choice(keys) if keys and rng.random() < 0.3 else v.key(rng, self.lexicon)
            statement = Statement(p.capital(wording.replace("{k}", key).replace("{w}", self.lexicon.word(rng))))
            sung.append(Placed(None, statement, self._spaced(rng, statement)))
        return sung

    def _query(
        self, rng: random.Random, spec: Spec, drawer: Drawer, known: Sequence[Item], number: int | None
    ) -> tuple[Query, Item | None]:
        """What to ask: the task's own query, else one about any known item, or about what is nowhere stated."""
        if spec.task == "absent" or rng.random() < spec.absent:
            return drawer.absent(known), None
        if spec.task == "multiquery" or (spec.task is None and rng.random() < 0.15):
            joined = [item for item in known if compound.can_join(item) and item.relation == drawer.shared_relation]
            if len(joined) > 1:
                count = min(rng.randint(2, most_values(hard=spec.hard)), len(joined))
                return compound.together(drawer, rng.sample(joined, count)), None
        if spec.task is not None or (number == 0 and spec.depth is not None):
            item = known[0]
            return next((q for q in item.queries if q.task == spec.task), item.queries[0]), item
        weights = [1 if item.value else 4 for item in known]

        def drawn() -> tuple[Query, Item]:
            item = rng.choices(known, weights)[0]
            return rng.choices(item.queries, [2 if query.listed else 1 for query in item.queries])[0], item

        query, item = drawn()
        for _ in range(REDRAWS):
            if id(query) not in drawer.posed:
                break
            query, item = drawn()
        drawer.posed.add(id(query))
        return query, item

    def _ask(
        self,
        rng: random.Random,
        spec: Spec,
        form: str,
        drawer: Drawer,
        known: Sequence[Item],
        *,
        number: int | None,
        opening: bool,
    ) -> Asked:
        """One question; `number` counts those of the first part, `opening` if a document stands right before it."""
        query, item = self._query(rng, spec, drawer, known, number)
        text = rng.choice(query.questions)
        stem = rng.choice(query.stems) if query.stems else ""
        early = ""
        if spec.early and number == 0:
            early = rng.choice(EARLY).format(q=text) + rng.choice(("\n", "\n\n"))
            body = "" if form == "chat" else rng.choice(EARLY_CUES)
        else:
            ending = rng.choice(ENDINGS[form] if form != "stem" or stem else ENDINGS["cue"])
            body = ending.format(q=text, s=stem)
            if rng.random() < 0.15 and not ending.startswith("{s}"):
                closing = p.HELD_OUT_CLOSING if spec.phrasing == "held_out" else p.CLOSING
                body = rng.choice(closing) + rng.choice(("\n", "\n", " ", "\n\n")) + body
        separator = rng.choice(SEPARATORS) if opening else "" if form == "chat" else rng.choice(("\n", "\n\n"))
        marks = self.codec.user if form == "chat" and not opening else ()
        before = [np.array(marks, np.int64), self.codec.encode(separator + body if body else "")]
        if form == "chat":
            before.append(np.array(self.codec.assistant))
        after = np.concatenate([self.codec.encode(gap(body) + query.answer), np.array(self.codec.eos, np.int64)])
        return Asked(text, form, query, item, np.concatenate(before), after, early)

    def _spaced(self, rng: random.Random, statement: Statement) -> np.ndarray:
        """The statement as it goes into the text, with the white space around it."""
        if statement.line or rng.random() < 0.2:
            left, right = (rng.choice(("\n", "")), "\n")
        elif rng.random() < 0.2:
            left, right = ("\n\n", "\n\n")
        else:
            left, right = (" ", "")
        return self.codec.encode(left + statement.text + right)

    def _document(
        self,
        rng: random.Random,
        assembly: Assembly,
        placed: Sequence[Placed],
        size: int,
        first: Item | None,
        depth: float | None,
    ) -> None:
        """Filler of `size` tokens with the statements in it, mostly between sentences, at uniform depths: those of one
        item in their order, and the first of `first` at `depth` if given.
        """
        text = self.filler.document(rng, size)
        lines = np.flatnonzero(self.codec.ends_line[text]) + 1
        sentences = np.flatnonzero(self.codec.ends_sentence[text][:-1] & self.codec.opens_gap[text][1:]) + 1

        def settled(cut: int, statement: Placed) -> int:
            """The cut moved to the end of a sentence or line near it."""
            line = statement.statement.line
            ends = lines if len(lines) and line else sentences
            if 0 < cut < size and len(ends) and (line or rng.random() < 0.9):
                near = int(ends[np.abs(ends - cut).argmin()])
                return near if abs(near - cut) < NEAR else cut
            return cut

        order: list[tuple[int, float, int, Placed]] = []
        groups: dict[Item | None, list[Placed]] = {}
        for statement in placed:
            groups.setdefault(statement.item, []).append(statement)
        for item, statements in groups.items():
            start = 0 if depth is None or item is not first or item is None else round(depth * size)
            cuts = sorted(
                rng.choice((start, size)) if rng.random() < 0.06 else rng.randint(start, size) for _ in statements
            )
            if depth is not None and item is first:
                cuts[0] = start
            tie, least = rng.random(), 0
            for number, (cut, statement) in enumerate(zip(cuts, statements, strict=True)):
                least = max(least, settled(cut, statement))
                order.append((least, tie, number, statement))
        position = 0
        for cut, _, _, statement in sorted(order, key=lambda entry: entry[:3]):
            assembly.add(text[position:cut])
            position = cut
            if statement.item is not None:
                assembly.spans.append((statement.statement, assembly.size, assembly.size + len(statement.ids)))
            assembly.add(statement.ids)
        assembly.add(text[position:])


def training_spec(rng: random.Random, length: int, chains: float = 0.14, *, hard: bool = False) -> Spec:
    """A draw of the training distribution: many facts and about as many questions, or a few in much text; some asked
    midway, some before the document; `chains` of them with chains alone. `hard` is that of `Spec`.
    """
    family = rng.choices(("chains", "pairs", "facts"), (chains, 0.07, 0.93 - chains))[0]
    mixture = Spec(length, absent=0.07, family=family, compounds=rng.choice(COMPOUNDS), hard=hard)
    most = max(2, int(min(384, length // 40) * (1 - mixture.compounds / 2)))  # about what fits
    few = rng.random() < (0.3 if length < 16384 else 0.6)
    items = _log_uniform(rng, most) if few else rng.randint(max(2, most // 3), most)
    if rng.random() < 0.05:
        return replace(mixture, items=items, early=True)
    # Fewer questions than facts: one that was asked before is answered by looking it up among the answers.
    questions = rng.randint(max(1, items // 2), items)
    turns = rng.choice((1, 1, 1, 2, 3))
    return replace(mixture, items=items, questions=questions, turns=turns)


def _log_uniform(rng: random.Random, most: int) -> int:
    return min(most, int((most + 1) ** rng.random()))
