"""Batches point at what they say, and are a function of their job alone."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from training import data
from training.data import CHOICE_WEIGHT, WIDE, Batches, FastRandom, Job, PieceCodec, collate, load_lexicon, loader
from training.recall.codec import Codec
from training.recall.events import event
from training.recall.grammar import compound_question
from training.recall.samples import Spec
from training.recall.tasks import Sampler, training_spec
from training.recall.vocabulary import ADJECTIVES, NOUNS, Lexicon


def test_collate_points_at_the_position_before_each_answer_token(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CROWD", 4)
    rng = random.Random(6)
    sampler = Batches(corpus, 2048)._sampler(False)
    samples = [sampler.draw(rng, training_spec(rng, 512, 0.9)) for _ in range(8)]
    batch = collate(samples)
    flat = batch.ids.reshape(-1)
    assert batch.ids.shape == (8, 512)
    assert (flat[batch.at + 1] == batch.token).all()
    assert sorted((batch.at + 1).tolist()) == np.flatnonzero(np.concatenate([s.target for s in samples])).tolist()
    assert int(batch.lead.sum()) == sum(int(s.lead.sum()) for s in samples)
    crowds = torch.tensor([len(s.questions) for s in samples for q in s.questions], dtype=torch.float32)
    choices = torch.from_numpy(np.concatenate([s.lead | s.fork for s in samples]))[batch.at + 1]
    assert choices.sum() > batch.lead.sum()
    each = torch.where(choices, CHOICE_WEIGHT, 1.0) / (crowds[batch.question] / 4).clamp(min=1).sqrt()
    torch.testing.assert_close(batch.weight, each)
    assert batch.questions == sum(len(s.questions) for s in samples) == int(batch.question.max()) + 1
    assert ((batch.text + 1) % 512 != 0).all()  # the next token is of the same row


def test_a_batch_is_a_function_of_its_job(corpus: Path) -> None:
    jobs = [Job("1 0", 512), Job("1 1", 1024), Job("s", 512, Spec(512, "chain"), unseen=True)]
    straight = [Batches(corpus, 1024)[job] for job in jobs]
    assert [tuple(batch.ids.shape) for batch in straight] == [(2, 512), (1, 1024), (2, 512)]
    assert straight[2].questions == 2
    backwards = Batches(corpus, 1024)
    again = [backwards[job] for job in reversed(jobs)][::-1]
    through_workers = list(loader(Batches(corpus, 1024), jobs, 2))
    for batch, *others in zip(straight, again, through_workers, strict=True):
        for other in others:
            for field in dataclasses.fields(batch):
                one, two = getattr(batch, field.name), getattr(other, field.name)
                assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
    assert not torch.equal(straight[0].ids, Batches(corpus, 1024)[Job("2 0", 512)].ids)


def test_remembered_pieces_are_the_tokenizers_own(corpus: Path) -> None:
    codec, plain = PieceCodec.load(corpus / "tokenizer"), Codec.load(corpus / "tokenizer")
    rng = random.Random(3)
    texts = ["", "a\r\n b\r c\n\n", "x\x1c\x0by\t\t z", "<|eos|> and <|", "snake_case 12,345.6!?", "naïve Ж 東 ½"]
    texts += ["".join(rng.choices("ab7 _-\n\t\r.<|>eoséß", k=rng.randint(1, 40))) for _ in range(500)]
    for text in texts:
        assert codec.encode(text).tolist() == plain.encode(text).tolist(), text
        assert codec.encode(text).dtype == np.int64


def test_fast_draws_reach_every_value_and_no_other() -> None:
    rng = FastRandom("seed")
    assert {rng.choice("abc") for _ in range(200)} == set("abc")
    assert {rng.randint(-1, 2) for _ in range(200)} == {-1, 0, 1, 2}
    assert max(rng.randint(0, 1 << 40) for _ in range(50)) > 1 << 35
    assert [FastRandom(5).randint(0, 9) for _ in range(3)] == [FastRandom(5).randint(0, 9)] * 3


def test_most_adjectives_and_nouns_of_training_are_of_no_list(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("quux\n")
    rng, trained, tested = random.Random(2), load_lexicon(tmp_path), Lexicon()
    for draw, listed in ((trained.adjective, ADJECTIVES), (trained.noun, NOUNS)):
        assert sum(draw(rng) not in listed for _ in range(2000)) / 2000 == pytest.approx(WIDE, abs=0.05)
    assert {tested.adjective(rng) for _ in range(500)} <= set(ADJECTIVES)


def test_some_verbs_of_training_are_any_word() -> None:
    lexicon = Lexicon(("quux",))
    told = [event(random.Random(i), lexicon).statements[0].lower() for i in range(300)]
    assert sum("quuxed" in text for text in told) > 20


@pytest.mark.parametrize(("hard", "most"), [(False, 4), (True, 6)])
def test_hard_documents_have_longer_lists(corpus: Path, hard: bool, most: int) -> None:
    sampler = Batches(corpus, 0)._sampler(unseen=False)
    rngs = [random.Random(i) for i in range(60)]
    drawn = [sampler.draw(rng, training_spec(rng, 2048, hard=hard)) for rng in rngs]
    for task in ("multivalue", "multiquery"):
        lists = [q.answer.count(",") + 1 for sample in drawn for q in sample.questions if q.query.task == task]
        assert max(lists) == most


def test_some_hard_documents_have_a_refrain(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, sung = Batches(corpus, 0)._sampler(unseen=False), []
    monkeypatch.setattr(Sampler, "_refrain", lambda *_: sung.append(1) or [])
    for hard, most in ((False, 0), (True, 40)):
        for i in range(60):
            sampler.draw(random.Random(i), training_spec(random.Random(i), 512, hard=hard))
        assert min(most, 1) <= len(sung) <= most


def test_a_refrain_is_one_wording_with_other_names(corpus: Path) -> None:
    sampler = Batches(corpus, 0)._sampler(unseen=False)
    sung = [placed.statement.text for placed in sampler._refrain(random.Random(3), 4096, [])]
    assert len(set(sung)) > len(sung) / 2 > 1
    ends = {text.split()[-1] for text in sung}
    assert len(ends) == 1 or len({text.split()[0] for text in sung}) == 1


def test_hard_documents_are_asked_in_more_ways_which_came_first() -> None:
    def asked(hard: bool) -> set[str]:
        rng = random.Random(5)
        return {compound_question(rng, "first_question", Lexicon(), hard=hard) for _ in range(3000)}

    assert not any("right as" in text.lower() for text in asked(hard=False))
    assert any("right as {k}" in text.lower() for text in asked(hard=True))


def test_a_job_has_its_share_of_hard_documents(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Spec] = []
    monkeypatch.setattr(data, "collate", lambda *_: None)
    monkeypatch.setattr(Sampler, "draw", lambda _, __, spec: drawn.append(spec))
    source = Batches(corpus, 200 * 512)
    for share, least, most in ((0.0, 0, 0), (0.5, 60, 140), (1.0, 200, 200)):
        drawn.clear()
        source[Job("a", 512, hard=share)]
        assert least <= sum(spec.hard for spec in drawn) <= most
