"""`--rope-scaling` is a short form of an override, and of nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from longreach.config import load_settings
from longreach.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yarn:4:32768", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
        ("yarn:2.5:32k", {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 32768}),
        ("dynamic:6", {"rope_type": "dynamic", "factor": 6.0}),
        ("linear:8", {"rope_type": "linear", "factor": 8.0}),
        ('{"type": "yarn", "factor": 4}', {"type": "yarn", "factor": 4}),
        ("none", None),
    ],
)
def test_the_short_form_is_an_override(monkeypatch: pytest.MonkeyPatch, text: str, value: Any) -> None:
    settings = load_settings(model="owner/name", rope_scaling=text, hf_overrides='{"vocab_size": 9}')
    assert settings.engine_config().hf_overrides == {"vocab_size": 9, "rope_scaling": value}
    monkeypatch.setenv("LONGREACH_ROPE_SCALING", text)
    assert load_settings(model="owner/name").engine_config().hf_overrides == {"rope_scaling": value}


@pytest.mark.parametrize(
    "text",
    [
        "yarn",
        "yarn:4",
        "yarn:0.5:32768",
        "yarn:4:0",
        "yarn:x:32768",
        "yarn:4:32768:1",
        "dynamic:2:4096",
        "su:4",
        "{",
        "[]",
    ],
)
def test_what_is_no_scaling_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--rope-scaling: (give yarn:FACTOR:ORIGINAL|not valid JSON)"):
        load_settings(model="owner/name", rope_scaling=text)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_scaling_and_an_override_of_it_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--rope-scaling: --hf-overrides has {name}, too"):
        load_settings(model="owner/name", rope_scaling="yarn:4:32768", hf_overrides=json.dumps({name: {}}))
