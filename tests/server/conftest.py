"""A tiny tokenizer for the server's tests: byte-level BPE, trained here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hypothesis
import pytest
import tokenizers
from longreach.text.tokenizer import Tokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

# A deadline would test how busy the machine is.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2500, stateful_step_count=100)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "no-deadline"))

CORPUS = [
    "The pass key for the silver lantern is 4071. The keeper of the lantern walks along the river.",
    "Grüße aus Köln: der Bär trägt eine Laterne über die Brücke.",
    "日本語の文字と 🦉 の絵文字。 The owl 🦉 and the family 👩‍👩‍👧 are here.",
    "def main():\n    return {'stop': [1, 2, 3]}\n\n",
]
BOS, EOS = "<|begin|>", "<|end|>"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a config and a fast tokenizer (BOS added, EOS known), but no weights."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(single=[BOS, "$A"], special_tokens=[(BOS, 0)])
    path = tmp_path_factory.mktemp("models") / "tiny-owl"
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of `model_dir`, as the server loads it."""
    return Tokenizer.load(str(model_dir))
