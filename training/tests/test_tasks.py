"""Samples are what they claim: statements and answers stand where they are said to, every task's answer follows from
its statements, held-out phrasings stay held out.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from longreach.bench.recall.sampler import NOT_STATED

from training.recall import compound, fiction, grammar, phrasings, unseen
from training.recall import vocabulary as v
from training.recall.documents import TASKS
from training.recall.facts import Drawer, Phrasing
from training.recall.forms import FORMS
from training.recall.samples import Family, Sample, Spec
from training.recall.tables import load
from training.recall.tasks import training_spec
from training.tests.recall_samplers import sampler

PHRASINGS = ("plain", "mixed", "held_out")


def draw(seed: object, spec: Spec) -> Sample:
    return sampler().draw(random.Random(f"{seed}"), spec)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("phrasing", PHRASINGS)
def test_every_task_has_the_length_the_statements_and_the_answer_it_says(task: str, phrasing: str) -> None:
    codec = sampler().codec
    for seed in range(6):
        form = FORMS[seed % len(FORMS)]
        sample = draw(seed, Spec(1024, task, form=form, phrasing=phrasing))  # type: ignore[arg-type]
        assert sample.ids.shape == sample.target.shape == (1024,)
        for statement, start, end in sample.spans:
            assert codec.decode(sample.ids[start:end]).strip() == statement.text.strip()
        (question,) = sample.questions
        answer = sample.ids[question.start : question.end]
        assert (answer[-1],) == codec.eos
        text = codec.decode(answer[:-1])
        assert text.strip() == question.answer
        assert question.end == 1024
        assert np.flatnonzero(sample.target).tolist() == list(range(question.start, question.end))
        values = len(question.answer.split(", ")) if task in ("multivalue", "multiquery") else 1
        assert values <= sample.lead.sum() <= 2 * values
        assert not (sample.lead & ~sample.target).any()
        prompt = sample.prompt(codec)
        assert prompt.endswith("<|assistant|>") == (form == "chat")
        assert text.startswith(" ") != prompt.endswith(" ")


def told(sample: Sample) -> str:
    """All statements, in the order of the text."""
    return "\n".join(statement.text for statement, _, _ in sorted(sample.spans, key=lambda span: span[1]))


@pytest.mark.parametrize("seed", range(8))
def test_answers_follow_from_the_statements(seed: int) -> None:
    def question(task: str) -> tuple[Sample, str, str]:
        sample = draw(f"{task} {seed}", Spec(1500, task, phrasing="plain"))
        return sample, sample.questions[0].answer, sample.questions[0].text

    def places(sample: Sample, values: list[str]) -> list[int]:
        return [told(sample).index(value) for value in values]

    sample, answer, _ = question("multivalue")
    values = answer.split(", ")
    assert 2 <= len(values) <= 4
    assert places(sample, values) == sorted(places(sample, values))

    sample, answer, _ = question("first")
    item = sample.questions[0].item
    assert item is not None
    assert answer in item.statements[0].text
    sample, answer, _ = question("last")
    item = sample.questions[0].item
    assert item is not None
    assert answer in item.statements[-1].text

    sample, answer, text = question("multiquery")
    assert 2 <= len(answer.split(", ")) <= 4
    assert all(value in told(sample) for value in answer.split(", "))

    sample, answer, text = question("chain")
    item = sample.questions[0].item
    assert item is not None
    assert len(item.statements) == 3
    assert [answer in statement.text for statement in item.statements] == [True, False, False]

    sample, answer, text = question("count")
    marked = re.search(r"\*\*\w+\*\*|<\w+>|#\w+|\[\w+]|__\w+?__|@\w+", text)
    assert marked is not None
    assert told(sample).count(marked[0]) == int(answer)

    sample, answer, _ = question("frequent")
    item = sample.questions[0].item
    assert item is not None
    counts = Counter(re.findall(r"\w+", item.statements[0].text))
    (top, most), (_, second) = counts.most_common(2)
    assert (top, most > 1.5 * second) == (answer, True)

    sample, answer, _ = question("copy")
    assert answer in told(sample)

    sample, answer, text = question("uuid")
    line = next(s.text for s, _, _ in sample.spans if answer in s.text)
    assert re.search(r"[0-9a-f-]{36}", text)[0] in line  # type: ignore[index]

    _, answer, _ = question("absent")
    assert answer == NOT_STATED


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("task", ["single", "multivalue", "chain"])
def test_depth_is_where_the_first_statement_stands(task: str, depth: float) -> None:
    for seed in range(8):
        sample = draw(seed, Spec(3000, task, form="bare", depth=depth))
        item = sample.questions[0].item
        assert item is not None
        starts = {id(statement): start for statement, start, _ in sample.spans}
        order = [starts[id(statement)] for statement in item.statements]
        assert order == sorted(order)
        assert order[0] / 3000 == pytest.approx(depth, abs=0.14)


def test_every_question_of_a_training_sample_follows_its_statements() -> None:
    rng, tasks = random.Random(5), Counter()
    for _ in range(120):
        sample = sampler().draw(rng, training_spec(rng, 1500))
        ends = {id(statement): end for statement, _, end in sample.spans}
        for question in sample.questions:
            tasks[question.query.task] += 1
            if question.item is not None:
                last = max(ends[id(statement)] for statement in question.item.statements)
                early = not sample.prompt(sampler().codec).rstrip().endswith(question.text)
                assert last <= question.start or early
            elif question.query.task == "absent":
                assert question.answer == NOT_STATED
    asked_for = {"single", *TASKS} - {"many", "multikey"}  # which are single questions among many facts
    assert set(tasks) == asked_for
    assert 0.02 < tasks["absent"] / tasks.total() < 0.1


def test_an_early_question_stands_before_the_document_and_nowhere_else() -> None:
    codec = sampler().codec
    for form in FORMS:
        sample = draw(form, Spec(800, "single", form=form, early=True))
        text, (question,) = sample.prompt(codec), sample.questions
        assert text.count(question.text) == 1
        first = min(start for _, start, _ in sample.spans)
        assert question.text in codec.decode(sample.ids[:first])


def test_keys_tell_facts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names are few, no key repeats another or is a part of it."""
    names = ("the red fox", "red fox", "fox", "Ada", "Ada Marsh", "the mill")
    monkeypatch.setattr(v, "key", lambda rng, lexicon: rng.choice(names))
    monkeypatch.setattr(v, "person", lambda rng: rng.choice(names))
    for seed in range(20):
        drawer = Drawer(random.Random(seed), v.Lexicon())
        keys = [fact.key.removeprefix("the ").lower() for fact in (drawer.fact() for _ in range(12)) if fact.key]
        assert len(keys) > 5
        assert not [(a, b) for i, a in enumerate(keys) for j, b in enumerate(keys) if i != j and f" {a} " in f" {b} "]


def _pattern(template: str, field: str = ".+?") -> re.Pattern[str]:
    return re.compile(field.join(re.escape(part) for part in re.split(r"{\w+}", template)))


def test_held_out_phrasings_never_occur_in_training() -> None:
    """Each held-out template's fixed words, found in no statement or question that training draws."""
    held_out = [
        *phrasings.HELD_OUT_STATEMENTS,
        *phrasings.HELD_OUT_QUESTIONS,
        *phrasings.HELD_OUT_RECORDS,
        *phrasings.HELD_OUT_RECORD_QUESTIONS,
        *(s for family in phrasings.HELD_OUT_FAMILIES for s in (*family.statements, *family.questions)),
        *(
            s
            for table in load("compound").values()
            for name in table
            if name.startswith("held_out_")
            for s in table[name]
        ),
    ]
    patterns = [_pattern(template) for template in held_out]
    rng = random.Random(1)
    seen: list[str] = []
    for _ in range(150):
        sample = sampler().draw(rng, training_spec(rng, 900))
        seen += [statement.text for statement, _, _ in sample.spans] + [question.text for question in sample.questions]
    assert len(seen) > 900
    assert not [(p.pattern, text) for p in patterns for text in seen if p.fullmatch(text)]
    assert not set(v.RELATIONS) & set(v.HELD_OUT_RELATIONS)
    assert not set(phrasings.INSTRUCTIONS) & set(phrasings.HELD_OUT_INSTRUCTIONS)
    # The same search does find them where they are used.
    for task in ("single", "multivalue", "chain", "count", "frequent", "copy"):
        sample = draw(task, Spec(1200, task, phrasing="held_out"))
        assert any(p.fullmatch(statement.text) for p in patterns for statement, _, _ in sample.spans), task
        assert any(p.fullmatch(sample.questions[0].text) for p in patterns), task


def test_a_phrase_that_holds_a_held_out_one_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands before it, with other capitals, fields and marks."""
    rules = {
        "statement": ["well, a note in the margin says that the {r} for {k} is {v}!", "{k}, whose {r} is {v}"],
        "question": ["Now name the {r} that was given for {k}", "{k}: {r}"],
        "record": ["name={k} | result={v}", "{k} {v}"],
        "record_question": ["what stands next to {k}", "{k}"],
        "last_question": ["name the final {r} for {k}?", "the last {r} for {k}"],
        "chain_value": ["assign {v} to {k}", "{v} into {k}"],
    }
    monkeypatch.setattr(grammar, "_GRAMMAR", grammar.Grammar(rules))
    rng, lexicon = random.Random(1), v.Lexicon()
    draws = {
        "statement": lambda: grammar.statement(rng, lexicon),
        "question": lambda: grammar.question(rng, lexicon),
        "record": lambda: grammar.record(rng, lexicon),
        "record_question": lambda: grammar.record_question(rng, lexicon),
        "last_question": lambda: grammar.compound_question(rng, "last_question", lexicon),
        "chain_value": lambda: grammar.compound_statement(rng, "chain_value", lexicon),
    }
    for name, draw_one in draws.items():
        held_out = rules[name][0].removeprefix("well, ").removeprefix("Now ").rstrip("?!").lower()
        assert not [text for text in (draw_one() for _ in range(40)) if held_out in text.lower()], name


def test_most_phrasings_of_several_statements_are_new_and_no_field_is_left() -> None:
    tables = load("compound")
    names = {"multivalue": ("repeated", "all"), "first": ("repeated", "first"), "last": ("repeated", "last")}
    others = {"multiquery": "together", "chain": "chain", "count": "counted", "frequent": "frequent", "copy": "passage"}
    names |= {task: (table, "questions") for task, table in others.items()}
    for task, (table, name) in names.items():
        field = r"\S+" if task in ("chain", "count", "copy") else ".+?"  # else "What is {k}?" is in many new ones
        patterns = [_pattern(template, field) for template in tables[table][name] if template.count(" ") > 1]
        fixed = 0
        for seed in range(40):
            sample = sampler().draw(random.Random(seed), Spec(700, task, phrasing="mixed"))
            fixed += any(p.search(sample.questions[0].text) for p in patterns)
        assert 2 <= fixed <= 20, (task, fixed)
    for seed in range(400):
        drawer = Drawer(random.Random(seed), v.Lexicon())
        items = [compound.chain(drawer, 2), compound.repeated(drawer, 2), compound.counted(drawer, 2)]
        items += [compound.frequent(drawer, 12), compound.passage(drawer, 6)]
        told = [statement.text for item in items for statement in item.statements]
        asked = [question for item in items for query in item.queries for question in query.questions]
        assert not [text for text in (*told, *asked) if re.search(r"{\w+}|\$\w+", text)]


def test_unseen_text_shares_no_sentence_with_what_training_reads() -> None:
    assert not set(unseen.NOISE) & set(fiction.NOISE)
    rng = random.Random(2)
    for kind in (unseen.foreign, unseen.novel, unseen.program, unseen.logs):
        texts = kind(rng, v.Lexicon())
        assert next(texts) != next(texts)
    other = sampler("unseen").draw(random.Random(1), Spec(900, "single"))
    assert len(other.ids) == 900


def test_same_seed_same_sample() -> None:
    first, second = (draw(4, Spec(600, items=3, questions=2)) for _ in range(2))
    assert (first.ids == second.ids).all()
    assert not (first.ids == draw(5, Spec(600, items=3, questions=2)).ids).all()


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (Spec(20), "use 512 or more"),
        (Spec(900, "needle"), "use one of single, many"),
        (Spec(900, form="poem"), "use one of chat, bare"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(spec: Spec, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        draw(0, spec)


@pytest.mark.parametrize("same", ["document", "chain", "statement"])
def test_chains_of_a_document_share_their_wording_or_do_not(same: str) -> None:
    wordings = Counter[int]()
    for seed in range(12):
        drawer = Drawer(random.Random(seed), v.Lexicon())
        drawer.same_wording = same
        found = set()
        for chain in [compound.chain(drawer, 2) for _ in range(4)]:
            (value,) = {query.answer for query in chain.queries}
            names = [stem.removesuffix(" =") for query in chain.queries for stem in query.stems]
            told = [statement.text.replace(value, "X") for statement in chain.statements[1:]]
            for name in sorted(names, key=len, reverse=True):
                told = [re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "X", text) for text in told]
            found.add(tuple(text.lower() for text in told))
        wordings[len(found)] += 1
        if same == "document":
            assert all(one == other for one, other in found)
    assert (max(wordings) == 1) == (same == "document")


def test_wordings_are_shared_in_training_alone() -> None:
    drawn = Counter(Drawer(random.Random(seed), v.Lexicon()).same_wording for seed in range(400))
    assert {same: round(n / 400, 1) for same, n in drawn.items()} == {"document": 0.6, "chain": 0.2, "statement": 0.2}
    assert {Drawer(random.Random(seed), v.Lexicon(), "plain").same_wording for seed in range(40)} == {"chain"}


def test_chains_name_each_variable_once() -> None:
    drawer = Drawer(random.Random(3), v.Lexicon())
    chains = [compound.chain(drawer, 3) for _ in range(6)]
    assert len({query.stems for item in chains for query in item.queries}) == 24


@pytest.mark.parametrize("size", [12, 60])  # the second does not fit and is drawn again, smaller
def test_what_a_document_is_made_of_is_what_its_spec_says(size: int) -> None:
    def asked(family: Family, compounds: float) -> Counter[str]:
        spec = Spec(512, items=size, questions=size, family=family, compounds=compounds)
        return Counter(q.query.task for seed in range(30) for q in draw(f"{family} {seed}", spec).questions)

    assert set(asked("chains", 0)) == {"chain", "single"}
    assert set(asked("pairs", 0)) == {"uuid"}
    assert set(asked("facts", 0)) <= {"single", "multiquery"}
    several = asked("facts", 1)
    assert set(several) > {"multivalue", "first", "last", "chain", "count", "copy"}
    assert several["single"] < 0.15 * several.total()  # the first variables of chains


def test_few_questions_are_asked_twice() -> None:
    shares = []
    for seed in range(60):
        rng = random.Random(seed)
        posed = [id(question.query) for question in sampler().draw(rng, training_spec(rng, 2048)).questions]
        shares.append(1 - len(set(posed)) / len(posed))
    assert sum(shares) / len(shares) < 0.12  # 0.2 and more where nobody looks


def test_words_put_into_a_question_leave_it_whole() -> None:
    rng, changed = random.Random(4), 0
    for _ in range(200):
        text = grammar.interrupted(rng, "what was the last {r} of {k}?", v.Lexicon(), 0.5)
        words = iter(text.split(" "))
        assert all(word in words for word in ["what", "was", "the", "last", "{r}", "of", "{k}?"])
        assert text.endswith("{k}?")
        changed += text != "what was the last {r} of {k}?"
    assert 70 < changed < 130


def _share_of_documents(holds: Callable[[Drawer], bool], phrasing: Phrasing) -> float:
    drawers = (Drawer(random.Random(f"{seed}"), v.Lexicon(), phrasing) for seed in range(400))
    return sum(map(holds, drawers)) / 400


def _few_digits(drawer: Drawer) -> bool:
    return len(set("".join(drawer.number(3, 7)[1:] for _ in range(12)))) <= 4  # the first replaces a zero


def _words_again(drawer: Drawer) -> bool:
    first, *others = (set(compound.passage(drawer, 20).queries[0].answer[:-1].lower().split()) for _ in range(4))
    return len(first & set().union(*others)) > 5


def _words_of_any_kind_for_a_relation(drawer: Drawer) -> bool:
    relation = drawer.new_relation()
    return " " in relation and not relation.endswith((*v.RELATIONS, "code", "number", "key", "name", "word"))


def _another_case(drawer: Drawer) -> bool:
    fact = drawer.relation()
    told = fact.statements[0].text
    return fact.key not in told and phrasings.capital(fact.key) not in told


@pytest.mark.parametrize(
    ("holds", "mixed", "plain"),
    [
        (_few_digits, 0.35, 0),
        (_words_again, 0.5, 0),
        (_words_of_any_kind_for_a_relation, 0.15, 0),
        (_another_case, 0.12, 0.03),  # of 0.3 and 0.08: most keys have few letters to change
    ],
)
def test_what_is_easily_confused_is_more_often_in_training(
    holds: Callable[[Drawer], bool], mixed: float, plain: float
) -> None:
    for phrasing, share in (("mixed", mixed), ("plain", plain)):
        assert abs(_share_of_documents(holds, phrasing) - share) < 0.06, phrasing
