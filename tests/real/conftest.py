"""The directories of real models; tests of one that cannot be downloaded are skipped, and say why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.packages import UnavailableError
from tests.real.smollm2 import smollm2


def directory_or_skip(model: Callable[[], Path]) -> Path:
    """A model's directory; the test is skipped where it cannot be downloaded."""
    try:
        return model()
    except UnavailableError as error:
        pytest.skip(f"no weights of a real model: {error}")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct."""
    return directory_or_skip(smollm2)
