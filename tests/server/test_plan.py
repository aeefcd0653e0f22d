"""`longreach plan`: what it promises is what the engine then reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from longreach import cli
from longreach.config import EMBEDDED_MODEL
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.build import build_engine
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from tests.patches.families.configs import config_of

GIB = 1 << 30
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}


def plan(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["plan", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of an 8B model, and no weights."""
    path = tmp_path_factory.mktemp("llama-8b")
    LlamaConfig(**LLAMA_8B).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (None, {}),
        (None, {"max_model_len": 5000, "page_size": 16, "dtype": "bfloat16"}),
        (None, {"kv_cache_memory": 3_000_000}),
        (None, {"kv_cache_dtype": "fp8", "max_model_len": 5000}),
        (None, {"page_bounds": True, "kv_cache_memory": 5_000_000}),
        (None, {"page_bounds": True, "kv_cache_dtype": "fp8", "max_model_len": 5000}),
        (LlamaConfig(hidden_size=128, intermediate_size=352, max_position_embeddings=9000, **SMALL), {}),
        (LlamaConfig(hidden_size=128, intermediate_size=352, tie_word_embeddings=True, **SMALL), {"max_num_seqs": 3}),
        (config_of("gemma4_text"), {}),
        (config_of("gemma4_text"), {"kv_cache_dtype": "fp8", "page_bounds": True, "kv_cache_memory": 4_000_000}),
        (config_of("gemma3n_text"), {"page_size": 16}),
        (config_of("qwen3_next"), {}),
        (
            config_of("olmo_hybrid"),
            {"kv_cache_memory": 4_000_000, "state_cache_bytes": 200_000, "kv_offload_bytes": 3_000_000},
        ),
        (
            Qwen3Config(hidden_size=128, intermediate_size=256, head_dim=48, max_position_embeddings=700, **SMALL),
            {"kv_cache_memory": 2_500_000, "page_size": 256},
        ),
    ],
)
def test_the_engine_reports_what_was_planned(config: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model = EMBEDDED_MODEL
    if config is not None:
        config.save_pretrained(model := tmp_path)
    flags = [
        text
        for name, value in options.items()
        for text in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    [row] = plan(model, "--device", "cpu", *flags)["rows"]
    settings = {"kv_cache_bytes" if name == "kv_cache_memory" else name: value for name, value in options.items()}
    engine, started = build_engine(
        EngineConfig(model=str(model), device="cpu", random_weights=config is not None, **settings)
    )
    assert (row["kv_tokens"], row["max_model_len"]) == (started.kv_tokens, started.max_model_len)
    assert (row["state_slots"], row["state_bytes"]) == (started.state_slots, started.state_bytes)
    assert row["host_kv_tokens"] == started.host_kv_tokens
    assert (row["host_kv_tokens"] > 0) == ("kv_offload_bytes" in options)
    loaded = engine._runner._loaded.patched.model  # type: ignore[attr-defined]
    tensors = [*loaded.parameters(), *loaded.buffers()]
    assert row["weight_bytes"] == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_an_8b_model_on_gpus(llama: Path) -> None:
    result = plan(llama, "--gpu-memory", "24GiB,80GiB", "--tensor-parallel-size", "1,2", "--kv-cache-dtype", "auto,fp8")
    assert (result["model_type"], result["dtype"]) == ("llama", "bfloat16")
    rows = {(row["memory_bytes"] // GIB, row["gpus"], row["kv_dtype"]): row for row in result["rows"]}
    assert len(rows) == 8
    one = rows[80, 1, "bfloat16"]
    # 8.03 billion parameters, and 32 layers of 8 KV heads of 128 numbers twice
    assert one["weight_bytes"] == pytest.approx(8.03e9 * 2, rel=0.001)
    assert one["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert one["max_model_len"] == 131072
    room = 0.9 * 80 * GIB - one["weight_bytes"] - one["step_bytes"]
    assert one["kv_tokens"] == pytest.approx(room / one["kv_bytes_per_token"], rel=0.04)
    assert one["concurrency"] == round(one["kv_tokens"] / 131072, 2)
    assert rows[80, 1, "float8_e4m3fn"]["kv_tokens"] == pytest.approx(2 * one["kv_tokens"], rel=0.001)
    whole = (128256 + 65) * 4096 * 2 + 64 * 4  # the embedding, the norms, and the frequencies of positions
    assert rows[80, 2, "bfloat16"]["weight_bytes"] - whole == pytest.approx((one["weight_bytes"] - whole) / 2, abs=512)
    assert rows[80, 2, "bfloat16"]["kv_bytes_per_token"] * 2 == one["kv_bytes_per_token"]
    assert rows[80, 2, "bfloat16"]["kv_tokens"] > 2 * one["kv_tokens"]
    small = rows[24, 1, "bfloat16"]
    assert small["max_model_len"] == small["kv_tokens"] < 131072


def test_keys_and_values_are_planned_layer_by_layer(tmp_path: Path) -> None:
    """One layer of six sees everything, with other heads than the rest; the last twelve of the model read others'."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 3000, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512}
    own = {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 64}

    def planned(**values: object) -> dict[str, Any]:
        Gemma4TextConfig(**(sizes | heads | own | values)).save_pretrained(tmp_path)
        [row] = plan(tmp_path, "--gpu-memory", "24GiB")["rows"]
        return row

    each, shared = planned(), planned(num_kv_shared_layers=12)
    # Eight groups of three of the larger layers: seven with windows, and one of four that see everything in two places.
    assert each["kv_bytes_per_token"] == 2 * 2 * 8 * 3 * (4 * 256)
    assert each["windows"]
    assert each["kv_bytes_per_request"] < each["kv_bytes_per_token"] * each["max_model_len"] / 5
    assert shared["kv_bytes_per_token"] == each["kv_bytes_per_token"] // 2
    assert shared["weight_bytes"] < each["weight_bytes"], "layers that read others' keys have no weights for them"
    assert planned(hidden_size_per_layer_input=1024)["step_bytes"] > 3 * each["step_bytes"]


def test_bounds_of_keys_take_a_sixteenth_of_the_layers_that_have_them(llama: Path) -> None:
    def planned(*arguments: str) -> dict[str, Any]:
        [row] = plan(llama, "--gpu-memory", "80GiB", *arguments)["rows"]
        return row

    without, bounds = planned(), planned("--page-bounds")
    some = planned("--page-bounds", "--attention-dense-layers", ",".join(map(str, range(24))))
    token = without["kv_bytes_per_token"]
    assert bounds["kv_bytes_per_token"] == token * 17 // 16
    assert some["kv_bytes_per_token"] == token + token // 4 // 16
    assert bounds["step_bytes"] == without["step_bytes"] + (128 << 20)
    room = without["kv_tokens"] * token - (128 << 20)
    assert bounds["kv_tokens"] == pytest.approx(room / bounds["kv_bytes_per_token"], abs=256)


def test_what_does_not_fit_says_so_and_the_others_are_planned(llama: Path) -> None:
    small, large = plan(llama, "--gpu-memory", "16GiB,80GiB", "--max-model-len", "128k")["rows"]
    assert (small["kv_tokens"], small["max_model_len"]) == (0, 0)
    assert "max_model_len 131072 needs a KV cache of 16.0 GiB" in small["problem"]
    assert large["problem"] is None
    printed = CliRunner().invoke(cli.app, ["plan", str(llama), "--gpu-memory", "16GiB,80GiB"])
    assert printed.exit_code == 0
    assert "no memory is left for the KV cache" in printed.stdout
    assert "131,072" in printed.stdout
    assert "15.0 GiB" in printed.stdout


def test_a_larger_step_leaves_less_for_pages(llama: Path) -> None:
    kv_tokens = [
        plan(llama, "--gpu-memory", "80GiB", "--max-batched-tokens", budget)["rows"][0]["kv_tokens"]
        for budget in ("4k", "64k")
    ]
    assert kv_tokens[1] < kv_tokens[0] - 30_000


def test_steps_that_unpack_weights_are_planned_longer_on_large_gpus(llama: Path) -> None:
    declared = json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}})
    found = plan(llama, "--gpu-memory", "48GiB,80GiB", "--hf-overrides", declared)["rows"]
    asked = plan(llama, "--gpu-memory", "80GiB", "--hf-overrides", declared, "--max-batched-tokens", "16384")["rows"]
    assert found[1]["step_bytes"] == asked[0]["step_bytes"] > 1.5 * found[0]["step_bytes"]


def test_host_memory_is_planned_in_tokens(llama: Path) -> None:
    arguments = ["--gpu-memory", "80GiB", "--kv-cache-dtype", "auto,fp8", "--kv-offload-bytes", "64GiB"]
    assert [row["host_kv_tokens"] for row in plan(llama, *arguments)["rows"]] == [2**19, 2**20]
    printed = CliRunner().invoke(cli.app, ["plan", str(llama), *arguments])
    assert "Host memory keeps 1,048,576 tokens (float8_e4m3fn) that are evicted." in printed.stdout
    [row] = plan(EMBEDDED_MODEL, "--device", "cpu", "--kv-offload-bytes", "64MiB")["rows"]
    engine, started = build_engine(EngineConfig(model=str(EMBEDDED_MODEL), device="cpu", kv_offload_bytes=64 << 20))
    assert row["host_kv_tokens"] == started.host_kv_tokens > 0
    pages = engine.stats.host_pages // started.page_groups
    assert pages * started.page_size == started.host_kv_tokens


def test_context_parallel_ranks_have_whole_weights_and_their_part_of_the_pages(llama: Path) -> None:
    sizes = ["--tensor-parallel-size", "1,2", "--context-parallel-size", "1,2"]
    result = plan(llama, "--gpu-memory", "80GiB", *sizes)
    rows = {(row["gpus"] // row["context_parallel_size"], row["context_parallel_size"]): row for row in result["rows"]}
    assert sorted(rows) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    output = 128256 * 4096 * 2  # the layer that all ranks split
    assert rows[1, 1]["weight_bytes"] - rows[1, 2]["weight_bytes"] == output / 2
    assert rows[2, 1]["weight_bytes"] - rows[2, 2]["weight_bytes"] == output / 4
    assert rows[1, 2]["kv_bytes_per_token"] * 2 == rows[1, 1]["kv_bytes_per_token"]
    assert rows[2, 2]["kv_bytes_per_token"] * 4 == rows[1, 1]["kv_bytes_per_token"]
    # A step has twice the tokens, and a rank half of what these take.
    assert rows[1, 2]["step_bytes"] == pytest.approx(rows[1, 1]["step_bytes"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context-parallel-size", "none"], "--context-parallel-size: give a number of GPUs, got 'none'"),
        (
            ["--tensor-parallel-size", "4", "--context-parallel-size", "4"],
            "8 KV heads cannot be split over 16 ranks evenly; products of the two sizes that work are 1, 2, 4, 8",
        ),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size: give a number of GPUs, got '0'"),
        (["--tensor-parallel-size", "two"], "--tensor-parallel-size: give a number of GPUs"),
        (
            ["--tensor-parallel-size", "1,16"],
            "8 KV heads cannot be split over 16 ranks evenly; sizes that work are 1, 2",
        ),
        (["--gpu-memory", "80 gigs"], "--gpu-memory: give bytes or"),
        (["--gpu-memory", "0"], "--gpu-memory: give more than 0 bytes"),
        (["--kv-cache-dtype", "int4"], "kv_cache_dtype must be auto or fp8, got 'int4'"),
        (["--max-model-len", "1M"], "longer than the 131072 positions"),
        (["--max-model-len", "1M"], "--rope-scaling yarn:FACTOR:ORIGINAL"),
        (["--hf-overrides", "{"], "--hf-overrides: not valid JSON"),
        (["--hf-overrides", '{"rope_scalling": {}}'], "did you mean rope_scaling?"),
        (["--hf-overrides", '{"hidden_act": "no_such"}'], "no model can be built of config.json"),
        (["--hf-overrides", '{"max_position_embeddings": null}'], "no usable config.json"),
        (["--page-size", "3"], "--page-size:"),
        (["--kv-offload-bytes", "64"], "--kv-offload-bytes: one page takes 16777216 bytes, got 64"),
        (["--device", "cpu", "--kv-offload-bytes", "8192GiB"], "--kv-offload-bytes: 8192.0 GiB are more than"),
        (["--device", "cpu", "--gpu-memory", "80GiB"], "says nothing about a CPU"),
        (["--page-bounds", "--tensor-parallel-size", "1,2"], "--page-bounds is for one GPU; leave it out, or"),
        (["--page-bounds", "--attention-dense-layers", "32"], "there is no layer 32"),
    ],
)
def test_wrong_arguments_are_a_line_and_status_2(llama: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["plan", str(llama), *arguments])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("longreach: error: ")
    assert message in line


def test_yarn_in_the_file_or_in_an_override_gives_the_longest_request(tmp_path: Path) -> None:
    """Qwen3-8B, with what its card says for 128K."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}
    Qwen3Config(**shape, max_position_embeddings=40960).save_pretrained(tmp_path)
    options = tmp_path, "--gpu-memory", "80GiB"
    [plain] = plan(*options)["rows"]
    [overridden] = plan(*options, "--hf-overrides", json.dumps({"rope_scaling": scaling}))["rows"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": scaling}))
    [own] = plan(*options)["rows"]
    assert [row["max_model_len"] for row in (plain, overridden, own)] == [40960, 131072, 131072]
    [asked] = plan(*options, "--max-model-len", "128k")["rows"]
    assert asked["max_model_len"] == 131072


def test_a_model_without_a_row_in_the_families_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    result = CliRunner().invoke(cli.app, ["plan", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "gpt2" in result.stderr
