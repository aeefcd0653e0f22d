"""The committed model and its tokenizer, and a corpus that is made in a second."""

from pathlib import Path

import numpy as np
import pytest
import torch
from longreach.config import EMBEDDED_MODEL
from tokenizers import Tokenizer

from training import tokenizer as bpe
from training.invented import INVENTED
from training.recall.codec import Codec
from training.recall.filler import TRAINING_MIX, Filler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a GPU are skipped where there is none, as in `tests`, whose conftest does not hold here."""
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The committed model."""
    return EMBEDDED_MODEL


@pytest.fixture(scope="session")
def bare_tokenizer() -> Tokenizer:
    """The committed tokenizer, without transformers around it."""
    return bpe.load(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `training.corpus` writes, with stories in the place of installed packages' text and of invented kinds."""
    directory = tmp_path_factory.mktemp("corpus")
    codec = Codec.load(EMBEDDED_MODEL)
    pools = dict(Filler.build(codec, TRAINING_MIX, 3000, 1).pools)
    pools |= {"prose": pools["story"], "code": pools["records"]} | dict.fromkeys(INVENTED, pools["story"])
    np.savez(directory / "pools.npz", **pools)  # pyright: ignore[reportArgumentType]
    (directory / "words.txt").write_text("lantern\nharbor\nmeadow\n")
    bpe.save(codec.tokenizer, directory / "tokenizer", 1024)
    return directory
