"""What static YaRN costs prompts within a model's native length, and what a choice of tables costs a step.

    python -m benchmarks.rope_by_request MODEL --scaling yarn:4:8192 --lengths 2048,6144,16384 --out result.json

Each prompt is read under each factor that holds it, by one engine. A pass key stands in a text about Python, and the
prompt ends where its digits would follow; recall is the share of answers that begin with them. The loss is the mean
negative log-likelihood, in nats, of a prompt's tokens behind the first 512. With `--speed SHAPE` tokens of a model of
random weights are timed as well: with static frequencies, with one table, and with requests of all tables at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from longreach.bench import shapes
from longreach.bench.sizes import whole_numbers
from longreach.bench.summary import environment
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling, Started
from longreach.engine.startup.build import build_engine
from longreach.engine.updates import Update
from longreach.setting_values import parse_rope_scaling
from longreach.text.tokenizer import Tokenizer
from longreach_patches import ROW_SHIFT, rope_tables
from longreach_patches.loader import load_config
from transformers import AutoModelForCausalLM

_KEYS = ("silver lantern", "copper bell", "green door", "tin whistle", "paper boat")
_ANSWER = 8
_UNSCORED = 512
_SETTLING = 8
_TIMED = 64
_CALLS = 50


def run(engine: Engine, requests: list[Generate]) -> dict[str, list[Update]]:
    """The updates of each request, all of which are in the engine at once.

    Raises:
        RuntimeError: one failed.
    """
    found: dict[str, list[Update]] = {request.request_id: [] for request in requests}
    failures = [failed for request in requests if (failed := engine.submit(request)) is not None]
    while engine.has_work:
        for news in engine.step():
            if isinstance(news, Failed):
                failures.append(news)
                continue
            for update in news.updates:
                found[update.request_id].append(update)
    if failures:
        raise RuntimeError(failures[0].message)
    return found


def with_key(tokenizer: Tokenizer, text: list[int], length: int, number: int) -> tuple[list[int], str]:
    """A prompt of about `length` tokens with a pass key in it, and the key's digits."""
    rng = random.Random(number)
    name, digits = _KEYS[number % len(_KEYS)], str(rng.randrange(10000, 99999))
    fact = tokenizer.encode_here(f"\nThe pass key for the {name} is {digits}.\n", special=False)
    end = tokenizer.encode_here(f"\n\nAs said above, the pass key for the {name} is", special=False)
    filler = length - len(fact) - len(end) - _ANSWER
    first = rng.randrange(len(text) - filler)
    at = first + int(filler * rng.uniform(0.05, 0.9))
    return [*text[first:at], *fact, *text[at : first + filler], *end], digits


def losses(engine: Engine, tables: list[Any], text: list[int], length: int, texts: int) -> dict[float, float]:
    """The mean loss by factor, of the same texts."""
    requests = [
        Generate(
            request_id=f"{table.factor}-{number}",
            prompt=text[number * length : (number + 1) * length - 1],
            max_tokens=1,
            prompt_logprobs=0,
            rope_factor=table.factor,
        )
        for table in tables
        for number in range(texts)
    ]
    by_factor: dict[float, list[float]] = {}
    for request in requests:  # one by one: rows of a vocabulary take memory
        updates = run(engine, [request])[request.request_id]
        told = [one.logprob for update in updates for one in update.prompt_logprobs]
        by_factor.setdefault(request.rope_factor, []).append(-statistics.fmean(told[_UNSCORED:]))
    return {factor: statistics.fmean(values) for factor, values in by_factor.items()}


def quality(model: str, scaling: str, lengths: list[int], prompts: int, texts: int) -> list[dict[str, Any]]:
    """Recall and loss by length and factor; a factor that is too small for a length is left out."""
    config = EngineConfig(
        model=model,
        hf_overrides={"rope_scaling": parse_rope_scaling(scaling)},
        rope_by_request=True,
        max_model_len=max(lengths) + _ANSWER,
        prefix_cache=False,
        kv_cache_bytes=None if torch.cuda.is_available() else 1 << 30,
    )
    engine, started = build_engine(config)
    tokenizer = Tokenizer.load(model)
    text = tokenizer.encode_here("\n\n".join(topics.values()), special=False)
    rows = []
    for length in lengths:
        tables = [table for table in started.rope_tables if table.length >= length]
        loss = losses(engine, tables, text, length, min(texts, len(text) // length))
        asked = [with_key(tokenizer, text, length, number) for number in range(prompts)]
        for table in tables:
            requests = [
                Generate(
                    request_id=str(number),
                    prompt=prompt,
                    max_tokens=_ANSWER,
                    sampling=Sampling(temperature=0.0),
                    rope_factor=table.factor,
                )
                for number, (prompt, _) in enumerate(asked)
            ]
            told = run(engine, requests)
            words = [_text(tokenizer, told[str(number)]) for number in range(prompts)]
            hits = sum(word.strip().startswith(digits) for word, (_, digits) in zip(words, asked, strict=True))
            row = {"length": length, "factor": table.factor, "recall": hits / prompts, "loss": loss[table.factor]}
            row["chosen"] = table == tables[0]
            print(f"{length:6d} factor {table.factor:g}: recall {hits}/{prompts}, loss {row['loss']:.4f}", flush=True)
            rows.append(row)
    engine.close()
    return rows


def _text(tokenizer: Tokenizer, updates: list[Update]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(detokenizer.push(token) for update in updates for token in update.tokens) + detokenizer.flush()


def timed(engine: Engine, started: Started, factors: list[float]) -> float:
    """Milliseconds of a step in which each of these requests gets a token; the median."""
    rng = random.Random(1)
    for number, factor in enumerate(factors):
        prompt = [rng.randrange(started.vocab_size) for _ in range(256)]
        engine.submit(
            Generate(
                request_id=f"{time.perf_counter()}-{number}",
                prompt=prompt,
                max_tokens=_TIMED + _SETTLING,
                sampling=Sampling(temperature=0.0),
                rope_factor=factor,
            )
        )
    times, since = [], time.perf_counter()
    while engine.has_work:
        engine.step()
        times.append(1e3 * (time.perf_counter() - since))
        since = time.perf_counter()
    return statistics.median(times[-_TIMED // 2 : -_SETTLING])


def speed(shape: str, layers: int) -> dict[str, Any]:
    """Milliseconds of a step of 1 and of 16 answers, of a shape with so many layers and YaRN of factor 8."""
    result: dict[str, Any] = {"shape": shape, "steps_ms": []}
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / shape
        shapes.write(shape, path)
        overrides = {"rope_scaling": scaling, "num_hidden_layers": layers}
        result["modules_us"] = modules(str(path), overrides) if torch.cuda.is_available() else []
        for by_request in (False, True):
            config = EngineConfig(
                model=str(path),
                hf_overrides=overrides,
                rope_by_request=by_request,
                random_weights=True,
                max_model_len=8192 if not torch.cuda.is_available() else 32768,
                kv_cache_bytes=1 << 30,
                max_num_seqs=16,
            )
            engine, started = build_engine(config)
            factors = [table.factor for table in started.rope_tables] or [0.0]
            for count in (1, 16):
                row = {"answers": count, "by_request": by_request, "one": timed(engine, started, [factors[-1]] * count)}
                if by_request and count > 1:
                    row["all"] = timed(engine, started, (factors * count)[:count])
                print(json.dumps(row), flush=True)
                result["steps_ms"].append(row)
            engine.close()
            del engine
            gc.collect()
    return result


def modules(model: str, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Microseconds that cosines and sines of a step take, as transformers computes them and from tables, in a graph."""
    config = load_config(model, overrides)
    with torch.device("cuda"):
        built: Any = AutoModelForCausalLM.from_config(_thin(config), dtype=torch.bfloat16)
    own = built.model.rotary_emb
    rows = []
    before = {tokens: _module_us(own, tokens, 1) for tokens in (1, 16, 8192)}
    tables = rope_tables.tables_of(config)
    rope_tables.install(built, tables)
    for tokens, static in before.items():
        row = {"tokens": tokens, "static": static, "tables": len(tables), "by_request": 0.0}
        row["by_request"] = _module_us(own, tokens, len(tables))
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def _thin(config: Any) -> Any:
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return config


def _module_us(module: Any, tokens: int, tables: int) -> float:
    places = torch.arange(tokens, device="cuda")
    positions = (places + ((places % tables) << ROW_SHIFT))[None]
    x = torch.zeros(1, 1, dtype=torch.bfloat16, device="cuda")
    module(x, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            module(x, positions)
    found = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / _CALLS)
    return statistics.median(found)


def main() -> None:
    """Measure, print rows as they come, and save all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--scaling", default="yarn:4:8192")
    parser.add_argument("--lengths", default="2048,6144")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--speed", metavar="SHAPE")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result: dict[str, Any] = {"environment": environment()}
    lengths = [*whole_numbers("--lengths", options.lengths)]
    if options.model is not None:
        result |= {"model": Path(options.model).name, "scaling": options.scaling}
        result["rows"] = quality(options.model, options.scaling, lengths, options.prompts, options.texts)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.speed is not None:
        result["speed"] = speed(options.speed, options.layers)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
