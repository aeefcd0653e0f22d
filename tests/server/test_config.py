"""Settings: where they come from, what they may be, and what the errors say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from longreach import config
from longreach.config import Settings, load_settings, unknown_variables
from longreach.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(config.variable(name), raising=False)


def test_a_flag_beats_a_variable_beats_the_default(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREACH_PORT", "9001")
    monkeypatch.setenv("LONGREACH_MAX_NUM_SEQS", "7")
    settings = load_settings(model=str(model_dir), port="9002", host=None)
    assert (settings.port, settings.max_num_seqs, settings.host) == (9002, 7, "127.0.0.1")


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("max_model_len", "32768", 32768),
        ("max_model_len", "128k", 131072),
        ("max_model_len", "1M", 2**20),
        ("max_model_len", "auto", None),
        ("max_batched_tokens", "8K", 8192),
        ("max_batched_tokens", "AUTO", None),
        ("kv_cache_memory", "4GiB", 4 * 2**30),
        ("kv_cache_memory", "4GB", 4 * 10**9),
        ("kv_cache_memory", "512 mib", 512 * 2**20),
        ("kv_cache_memory", "1048576", 2**20),
        ("kv_cache_memory", "auto", None),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("gpu_memory_utilization", "1", 1.0),
        ("cuda_graphs", "false", False),
        ("random_weights", "1", True),
        ("device", "cuda:1", "cuda:1"),
        ("max_body_bytes", "1MiB", 2**20),
        ("max_itl", "40", 40),
        ("max_itl", "40ms", 40),
        ("max_itl", "2s", 2000),
        ("max_queued_tokens", "2M", 2**21),
        ("speculate", "8", 8),
        ("prefix_cache", "false", False),
        ("generation_config", "openai", "openai"),
        ("hf_overrides", '{"a": {"b": [1, null]}}', '{"a": {"b": [1, null]}}'),
    ],
)
def test_values_as_flag_and_as_variable(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, field: str, text: str, value: object
) -> None:
    assert getattr(load_settings(model=str(model_dir), **{field: text}), field) == value
    monkeypatch.setenv(config.variable(field), text)
    assert getattr(load_settings(model=str(model_dir)), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "http"),
        ("port", True),
        ("port", 80.0),
        ("host", ""),
        ("max_model_len", "0"),
        ("max_model_len", "-5"),
        ("max_model_len", "5x"),
        ("max_model_len", "1e5"),
        ("max_model_len", "17M"),
        ("max_num_seqs", "0"),
        ("max_num_seqs", "1025"),
        ("max_batched_tokens", "1"),
        ("page_size", "48"),
        ("page_size", "8"),
        ("kv_cache_memory", "4 gigs"),
        ("kv_cache_memory", "1"),
        ("gpu_memory_utilization", "0"),
        ("gpu_memory_utilization", "1.1"),
        ("gpu_memory_utilization", "nan"),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", "inf"),
        ("keep_alive_seconds", "0"),
        ("shutdown_grace_seconds", "-1"),
        ("max_body_bytes", "10"),
        ("max_itl", "0"),
        ("max_itl", "0.05"),
        ("max_queued_requests", "0"),
        ("max_queued_tokens", "0"),
        ("resume_seconds", "-1"),
        ("silence_timeout", "0.5"),
        ("step_timeout", "0"),
        ("max_engine_restarts", "-1"),
        ("max_connections", "0"),
        ("max_header_bytes", "1023"),
        ("header_timeout", "0"),
        ("body_timeout", "nan"),
        ("write_timeout", "-1"),
        ("max_total_body_bytes", "5"),
        ("allowed_hosts", ""),
        ("allowed_hosts", "a.example,"),
        ("allowed_hosts", "a.example:8000"),
        ("allowed_hosts", "http://a.example"),
        ("allowed_hosts", "*,a.example"),
        ("allowed_hosts", "a.*.example"),
        ("allowed_hosts", "*.*"),
        ("allowed_hosts", "bär.example"),
        ("allowed_hosts", "[::1"),
        ("allowed_hosts", ",".join(["a"] * 33)),
        ("allowed_origins", "example.org"),
        ("allowed_origins", "https://a.example/path"),
        ("allowed_origins", "https://a.example,*"),
        ("speculate", "33"),
        ("device", "tpu"),
        ("device", "cuda:"),
        ("dtype", "int4"),
        ("attention_backend", "magic"),
        ("log_level", "loud"),
        ("served_model_name", "two words"),
        ("served_model_name", "x" * 129),
        ("served_model_name", "owl\n"),
        ("served_model_name", ""),
        ("served_model_name", "owl,"),
        ("served_model_name", "owl, owl-latest"),
        ("served_model_name", "owl,lark,owl"),
        ("served_model_name", ",".join(f"owl-{number}" for number in range(33))),
        ("cuda_graphs", "maybe"),
        ("generation_config", "vllm"),
        ("hf_overrides", "{"),
        ("hf_overrides", "[1]"),
        ("hf_overrides", "{'a': 1}"),
        ("hf_overrides", '{"a": NaN}'),
        ("hf_overrides", {"a": 1}),
        ("nonsense", "1"),
    ],
)
def test_a_wrong_value_names_the_flag(model_dir: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(model=str(model_dir), **{field: value})
    message = str(caught.value)
    assert message.startswith(config.flag(field) + ": ")
    assert "\n" not in message


def test_overrides_reach_the_engine(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(model=str(model_dir)).engine_config().hf_overrides == {}
    monkeypatch.setenv("LONGREACH_HF_OVERRIDES", '{"rope_scaling": {"factor": 4.0}}')
    assert load_settings(model=str(model_dir)).engine_config().hf_overrides == {"rope_scaling": {"factor": 4.0}}


def test_a_revision_is_of_a_hub_id(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for revision in ("main", "refs/pr/1", "v1.0", "8c1f6a0"):
        assert load_settings(model="owner/name", revision=revision).engine_config().revision == revision
    assert load_settings(model="owner/name").engine_config().revision is None
    for wrong in ("", "../main", "pr/../../x", "main/", "main branch", "x" * 129):
        with pytest.raises(ConfigError, match=r"^--revision: give a branch, a tag or a commit"):
            load_settings(model="owner/name", revision=wrong)
    monkeypatch.setattr(config, "EMBEDDED_MODEL", model_dir)
    for model in (str(model_dir), None):
        with pytest.raises(ConfigError, match=r"^--revision: MODEL is a directory; only hub ids"):
            load_settings(model=model, revision="main")


def test_a_wrong_variable_is_named_and_all_mistakes_are_told(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREACH_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(ConfigError) as caught:
        load_settings(model=str(model_dir), page_size="48")
    port, page_size = sorted(str(caught.value).splitlines(), reverse=True)
    assert port.startswith("--port (from LONGREACH_PORT): ")
    assert "enableServiceLinks" in port
    assert page_size.startswith("--page-size: ")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_beyond_loopback_only_when_told(model_dir: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host: .* --allow-unauthenticated"):
        load_settings(model=str(model_dir), host=host)
    for leave in ({"allow_unauthenticated": True}, {"api_key": "a-secret-key"}, {"api_key_file": "keys"}):
        assert load_settings(model=str(model_dir), host=host, **leave).host == host


def test_no_message_and_no_repr_shows_a_key(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a-secret-key" not in repr(load_settings(model=str(model_dir), api_key="a-secret-key"))
    with pytest.raises(ConfigError, match="--api-key: ") as caught:
        load_settings(model=str(model_dir), api_key=["a-secret-key"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_leave(model_dir: Path, host: str) -> None:
    assert load_settings(model=str(model_dir), host=host).host == host


def test_the_models_name(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(model=str(model_dir)).name == "tiny-owl"
    assert load_settings(model=str(model_dir) + "/").name == "tiny-owl"
    assert load_settings(model="owner/name-7b").name == "owner/name-7b"
    assert load_settings(model=str(model_dir), served_model_name="owl").names == ("owl",)
    several = load_settings(model=str(model_dir), served_model_name="owl,acme/owl-7b")
    assert (several.name, several.names) == ("owl", ("owl", "acme/owl-7b"))
    monkeypatch.setattr(config, "EMBEDDED_MODEL", model_dir)
    embedded = load_settings()
    assert (embedded.name, embedded.model_source) == ("longreach-default", str(model_dir))


def test_models_that_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("file", "adapter/adapter_config.json", "meta/params.json", "gguf/file.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for model in ("gguf", "gguf/file.gguf"):
        load_settings(model=str(tmp_path / model))
    for model, words in (
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "meta"), "no config.json .it is in the form of Meta's or Mistral's own code.; give"),
        (str(tmp_path / "file"), "is a file, and not GGUF"),
        (str(tmp_path / "adapter"), "holds an adapter"),
        (str(tmp_path / "absent"), "there is no directory"),
        ("../up", "there is no directory"),
    ):
        with pytest.raises(ConfigError, match=f"^MODEL: .*{words}"):
            load_settings(model=model)
    monkeypatch.setattr(config, "EMBEDDED_MODEL", tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"^MODEL: "):
        load_settings()


def test_every_engine_setting_reaches_the_engine(model_dir: Path) -> None:
    values: dict[str, Any] = {
        "device": "cuda:1",
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "max_model_len": 1024,
        "max_num_seqs": 3,
        "max_batched_tokens": 512,
        "page_size": 32,
        "gpu_memory_utilization": 0.5,
        "cuda_graphs": False,
        "random_weights": True,
        "prefix_cache": False,
        "kv_offload_bytes": 2**30,
        "kv_disk_bytes": 2**32,
        "kv_disk": "/kv",
        "state_cache_bytes": 2**28,
        "resume_seconds": 7.0,
        "max_queued_requests": 9,
        "max_queued_tokens": 4096,
        "silence_timeout": 5.0,
        "step_timeout": 7.0,
    }
    engine = load_settings(model=str(model_dir), kv_cache_memory="2MiB", max_itl="80ms", **values).engine_config()
    assert engine.max_itl == 0.08
    assert engine.model == str(model_dir)
    assert engine.kv_cache_bytes == 2**21
    for name, value in values.items():
        assert getattr(engine, name) == value, name


def test_variables_that_set_nothing_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREACH_MAX_MODEL_LENGTH", "1")
    monkeypatch.setenv("LONGREACH_PORT", "1")
    assert "LONGREACH_MAX_MODEL_LENGTH" in unknown_variables()
    assert "LONGREACH_PORT" not in unknown_variables()
    monkeypatch.setenv("LONGREACH_DEBUG", "1")
    assert "LONGREACH_DEBUG" not in unknown_variables()


def test_settings_are_frozen(model_dir: Path) -> None:
    settings = load_settings(model=str(model_dir))
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]
