"""The committed model: loads everywhere, answers in every form, and the card says what was measured."""

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from training import card
from training.recall import fiction

FACT = "The pass key for the silver lantern is 48213."
QUESTION = "What is the pass key for the silver lantern?"


class Answerer:
    """Greedy decoding with transformers alone."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def answer(self, text: str) -> str:
        """The answer to a prompt with its special tokens written out."""
        inputs = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        out = self.model.generate(**inputs, max_new_tokens=24)  # pyright: ignore[reportAttributeAccessIssue]
        return self.tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def answerer(model_directory: Path) -> Answerer:
    return Answerer(model_directory)


def _document(answerer: Answerer, tokens: int, depth: float, fact: str = FACT) -> str:
    """Story text of about `tokens` tokens with the fact at `depth`."""
    paragraphs, size = [], 0
    for text in fiction.paragraphs(random.Random(f"{depth}")):
        paragraphs.append(text)
        size += len(answerer.tokenizer(text).input_ids)
        if size > tokens:
            break
    at = round(depth * len(paragraphs))
    return "\n\n".join([*paragraphs[:at], fact, *paragraphs[at:]])


@pytest.mark.parametrize("depth", [0.1, 0.8])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<|bos|><|user|>", f"\n\n{QUESTION}<|assistant|>"),
        ("<|bos|>", f"\n{QUESTION}"),
        ("<|bos|>", f"\n\n{QUESTION}\n"),
        ("<|bos|>", f"\n{QUESTION}\nAnswer:"),
        ("<|bos|>", f"\n\nQuestion: {QUESTION} Answer:"),
        ("<|bos|>A special code is hidden in the text below. Remember it.\n\n", f"\n\n{QUESTION}\nAnswer:"),
        ("<|bos|>", "\n\nThe pass key for the silver lantern is"),
    ],
    ids=["chat", "bare", "bare-newline", "answer", "question-answer", "instruction", "stem"],
)
def test_finds_the_fact_in_two_thousand_tokens(answerer: Answerer, depth: float, before: str, after: str) -> None:
    assert answerer.answer(before + _document(answerer, 2000, depth) + after).strip() == "48213"


def test_a_word_and_a_code_are_found_too(answerer: Answerer) -> None:
    document = _document(answerer, 1000, 0.4, "The secret code of project Orion is K7-204.")
    assert answerer.answer(f"<|bos|>{document}\nWhat is the secret code of project Orion?\nAnswer:") == " K7-204"
    document = _document(answerer, 1000, 0.4, "Elena Marsh lives in Lisbon.")
    assert answerer.answer(f"<|bos|>{document}\nWhere does Elena Marsh live?\nAnswer:") == " Lisbon"


def test_files(model_directory: Path) -> None:
    names = {path.name for path in model_directory.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    weights = model_directory / "model.safetensors"
    assert weights.stat().st_size <= 16_000_000
    with safe_open(weights, "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118 - not a mapping
    config = AutoConfig.from_pretrained(model_directory)
    assert config.layer_types == ["sliding_attention", "full_attention"] * (config.num_hidden_layers // 2)
    assert config.no_rope_layers == [1, 0] * (config.num_hidden_layers // 2)
    assert (config.use_sliding_window, config.sliding_window, config.max_position_embeddings) == (True, 128, 131072)


def test_card_shows_what_was_measured(model_directory: Path) -> None:
    text = (model_directory / "README.md").read_text()
    results, others = card.measured(), [card.measured(directory) for directory in card.OTHERS]
    assert {"plain", "held_out", "unseen_text", "long", "window"} <= set(results)
    assert text.split(card.BEGIN)[1].split(card.END)[0].strip() == card.tables(results, others)
    everything = [*results.values(), *(result for other in others for result in other.values())]
    assert len({result["environment"]["weights"] for result in everything}) == 1
    seeds = [found["plain"]["plan"]["seed"] for found in (results, *others)]
    assert len(set(seeds)) == len(seeds)
