"""Documents that stay: what an engine has read is not read again by the next one, and every answer is the plain one."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach.engine.disk import entry_file
from longreach.engine.engine import Engine
from longreach.engine.kv_cache import borders, disk_tier
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.engine.updates import Update
from transformers import PreTrainedConfig

from tests.patches.families.configs import config_of, random_model
from tests.server.engine.disk.test_disk_store import files_below
from tests.server.engine.driving import build, drain, spec

PAGE = 16
# A model of full layers, one with windows beside them, and one with recurrent states.
KINDS = ("llama", "gemma3_text", "qwen3_next")
HOST = 8 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of each kind."""
    found = {}
    for kind in KINDS:
        config: PreTrainedConfig = config_of(kind)
        config.max_position_embeddings = 2048
        found[kind] = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        random_model(config, torch.float32).save_pretrained(found[kind])
    return found


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the disk, however slow it is: computing these prompts would take next to nothing. States do not
    wait for the one after them."""
    monkeypatch.setattr(Scheduler, "_seconds_to_read", lambda self, request, start, end: 30.0)
    monkeypatch.setattr(disk_tier, "_STATE_SECONDS", 0.1)


def text(seed: int, length: int) -> list[int]:
    return torch.randint(5, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENT = text(1, 1200)


def engine_of(model: Path, disk: Path | None, **changes: Any) -> Engine:
    below = {} if disk is None else {"kv_disk": str(disk), "kv_disk_bytes": 64 << 20, "kv_offload_bytes": HOST}
    settings = {"kv_cache_bytes": 16 << 20, "max_batched_tokens": 512, "dtype": "float32"} | below | changes
    return build(model, **settings)[0]


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 12) -> tuple[list[int], int]:
    """The answer to a prompt, and how many of its tokens were cached."""
    answer, last = last_update(engine, name, prompt, max_tokens)
    return answer, last.cached


def last_update(engine: Engine, name: str, prompt: list[int], max_tokens: int = 12) -> tuple[list[int], Update]:
    """The answer to a prompt, and the last news of it."""
    assert engine.submit(spec(name, prompt, max_tokens=max_tokens)) is None
    tokens, updates, failures = drain(engine)
    assert not failures
    engine.scheduler.check()
    return tokens[name], updates[name][-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_reads_nothing_again(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    questions = [DOCUMENT + text(seed, 20) for seed in (2, 3)]
    plain = [ask(engine_of(models[kind], None), "plain", prompt)[0] for prompt in questions]
    first = engine_of(models[kind], tmp_path)
    answer, cached = ask(first, "first", questions[0])
    assert (answer, cached) == (plain[0], 0)
    first.close()
    assert first.stats.disk is not None
    again = engine_of(models[kind], tmp_path)
    answer, last = last_update(again, "same", questions[0])
    assert answer == plain[0]
    cached = last.cached
    assert (last.cached_disk, last.cached_host) == (cached, 0)
    assert cached >= 0.99 * len(DOCUMENT) or (kind == "qwen3_next" and cached >= len(DOCUMENT) - 128)
    answer, last = last_update(again, "second", questions[1])
    assert answer == plain[1]
    assert last.cached >= len(DOCUMENT) - 128
    assert last.cached_disk + last.cached_host < last.cached, "most of it is on the device"
    assert again.stats.disk is not None
    assert again.stats.disk.read_bytes > 0
    assert again.stats.disk.damaged == 0
    again.close()


def test_of_windows_only_what_somebody_may_return_to_is_written(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages before borders of the end of the prompt, of its answer's, of spaced ones, and where somebody turned off."""
    monkeypatch.setattr(borders, "TAIL_TOKENS", 4 * PAGE)
    monkeypatch.setattr(borders, "SPACING_TOKENS", 32 * PAGE)
    turned = DOCUMENT[: 20 * PAGE] + text(4, 100)
    with contextlib.closing(engine_of(models["gemma3_text"], None, prefix_cache=False)) as plain_engine:
        answer, _ = ask(plain_engine, "plain", DOCUMENT, max_tokens=40)
        turn = DOCUMENT + answer + text(5, 20)
        plain = [ask(plain_engine, f"plain {n}", prompt)[0] for n, prompt in enumerate((turned, turn))]
    with contextlib.closing(engine_of(models["gemma3_text"], tmp_path)) as first:
        assert ask(first, "first", DOCUMENT, max_tokens=40)[0] == answer
        groups = first.scheduler.allocator.groups
    written, pages = len(files_below(tmp_path)), (len(DOCUMENT) + 39) // PAGE
    # The windows have 13 tokens: a border needs one page before it.
    assert groups.behind == (0, 1, 1, 1)
    ends = {31, 63, pages - 1} | set(range(len(DOCUMENT) // PAGE - 5, len(DOCUMENT) // PAGE))
    assert written == pages + 3 * len(ends)
    with contextlib.closing(engine_of(models["gemma3_text"], tmp_path)) as again:
        assert ask(again, "turn", turn) == (plain[1], pages * PAGE)
        assert ask(again, "turned", turned) == (plain[0], 0), "no border before that place was kept"
    with contextlib.closing(engine_of(models["gemma3_text"], tmp_path)) as third:
        assert ask(third, "turned", turned) == (plain[0], len(turned) // PAGE * PAGE)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_costs_only_reading_again(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    prompt = DOCUMENT + text(2, 20)
    first = engine_of(models[kind], tmp_path)
    plain, _ = ask(first, "first", prompt)
    first.close()
    draw = random.Random(5)
    for path in files_below(tmp_path)[::3]:
        contents = bytearray(path.read_bytes())
        contents[draw.randrange(entry_file.HEADER_BYTES, len(contents))] ^= 1 << draw.randrange(8)
        path.write_bytes(contents)
    again = engine_of(models[kind], tmp_path)
    answer, _ = ask(again, "again", prompt)
    assert answer == plain
    assert again.stats.disk is not None
    assert again.stats.disk.damaged > 0
    again.close()
    # What was damaged has been written anew.
    third = engine_of(models[kind], tmp_path)
    answer, cached = ask(third, "third", prompt)
    assert answer == plain
    assert cached >= len(DOCUMENT) - 128
    assert third.stats.disk is not None
    third.close()


def test_what_does_not_match_is_not_used(models: dict[str, Path], tmp_path: Path) -> None:
    """Other weights under the same name, another dtype of pages, another salt, another page size."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    weights = random_model(config_of("llama"), torch.float32)
    for factor in (1.0, 1.001):
        with torch.no_grad():
            for parameter in weights.parameters():
                parameter.mul_(factor)
        weights.save_pretrained(model)
        engine = engine_of(model, disk)
        assert ask(engine, "first", DOCUMENT[:300])[1] == 0, f"weights times {factor}"
        engine.close()
    for changes in ({"kv_cache_dtype": "fp8"}, {"page_size": 32}, {"dtype": "bfloat16"}):
        engine = engine_of(model, disk, **changes)
        assert ask(engine, "other", DOCUMENT[:300])[1] == 0, changes
        engine.close()
    engine = engine_of(model, disk)
    assert engine.submit(spec("salted", DOCUMENT[:300], max_tokens=2, cache_salt="other")) is None
    assert drain(engine)[1]["salted"][-1].cached == 0
    assert ask(engine, "same", DOCUMENT[:300])[1] >= 272
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_host_memory_may_be_smaller_than_the_document(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """All of it comes from disk, in turns, which end where there is a copy of the state, if the model has any."""
    engine, started = build(models[kind])
    engine.close()
    first = engine_of(models[kind], tmp_path)
    plain, _ = ask(first, "first", DOCUMENT)
    first.close()
    places = 20 + -(-started.state_bytes // started.page_bytes)
    small = engine_of(models[kind], tmp_path, kv_offload_bytes=places * started.page_bytes)
    answer, last = last_update(small, "again", DOCUMENT)
    assert answer == plain
    assert last.cached_disk == last.cached
    if kind == "qwen3_next":
        assert last.cached > 0
    else:
        assert last.cached == len(DOCUMENT) - PAGE, "the last token is always computed"
    small.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_disk": "x"}, "say how many bytes"),
        ({"kv_disk_bytes": 1 << 20}, "name that, too"),
        ({"kv_disk": "x", "kv_disk_bytes": 1 << 20}, "give --kv-offload-bytes"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    models: dict[str, Path], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        build(models["llama"], **settings)
