"""The committed model, its tokenizer, and samplers that need no corpus."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from training.filler import Codec, Filler
from training.tasks import Sampler
from training.vocabulary import Lexicon

from training import tokenizer as bpe

MODEL = Path(__file__).resolve().parents[2] / "server" / "longreach" / "default_model"


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The committed model."""
    return MODEL


@pytest.fixture(scope="session")
def bare_tokenizer() -> Tokenizer:
    """The committed tokenizer, without transformers around it."""
    return bpe.load(MODEL)


@pytest.fixture(scope="session")
def samplers(bare_tokenizer: Tokenizer) -> dict[str, Sampler]:
    """Samplers over generated text, which needs no corpus: `seen` and `held_out`."""
    codec = Codec(bare_tokenizer)
    mixes = {
        "seen": {"story": 0.5, "records": 0.3, "noise": 0.2},
        "held_out": {"held_out_story": 0.6, "held_out_records": 0.2, "held_out_noise": 0.2},
    }
    return {name: Sampler(codec, Filler.build(codec, mix, 20_000, seed=3), Lexicon()) for name, mix in mixes.items()}
