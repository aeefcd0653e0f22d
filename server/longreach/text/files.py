"""Files that stand beside a model's weights."""

from __future__ import annotations

from pathlib import Path

from longreach import hub


def model_file(model: str, name: str) -> Path | None:
    """A file of a model directory or hub id; None if the model has none.

    Raises:
        ModelFilesError: the model itself is neither here nor to be had.
    """
    path = hub.small_files(model) / name
    return path if path.is_file() else None


def chat_template_files(model: str) -> list[Path]:
    """The files of a model's named chat templates, by name.

    Raises:
        ModelFilesError: as `model_file`.
    """
    return sorted(path for path in (hub.small_files(model) / hub.TEMPLATES).glob("*.jinja") if path.is_file())
