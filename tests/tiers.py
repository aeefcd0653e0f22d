"""Which tier a test belongs to, and which tests run alone.

A test has exactly one tier: that of the longest path of `TIER_OF` that it lies under, or the one that it, its class or
its module is marked with. `pytest -m unit` runs one tier. A test on a GPU is `kernel` where its file
is `unit`.
"""

from __future__ import annotations

TIERS = {
    "unit": "plain functions and objects: no process, no server, no Triton interpreter; all of them in a minute",
    "kernel": "kernels and patched layers, in Triton's interpreter, compiled for GPUs that are not there, or on a GPU",
    "system": "engines, servers, browsers and commands, many of them in processes of their own",
}
SERIAL = "serial"
SERIAL_MEANS = "measures time or memory, or needs a process without other tests: it runs after those side by side"

TIER_OF = {
    "tests": "system",
    "tests/test_adr_index.py": "unit",
    "tests/test_architecture_page.py": "unit",
    "tests/test_changelog.py": "unit",
    "tests/test_generated_pages.py": "unit",
    "tests/test_hard_sentences.py": "unit",
    "tests/test_pairwise.py": "unit",
    "tests/test_parameters.py": "unit",
    "tests/test_planted_faults.py": "unit",
    "tests/test_security_page.py": "unit",
    "tests/test_troubleshooting.py": "unit",
    "tests/test_tiers.py": "unit",
    "tests/test_workers.py": "unit",
    "tests/benchmarks": "unit",
    "tests/benchmarks/test_compare.py": "system",
    "tests/benchmarks/test_methods_command.py": "system",
    "tests/benchmarks/test_quality.py": "system",
    "tests/benchmarks/test_training_steps.py": "system",
    "tests/clients": "unit",
    "tests/clients/test_processes.py": "system",
    "tests/kernels": "kernel",
    "tests/kernels/delta/test_convolution.py": "unit",
    "tests/kernels/delta/test_rule.py": "unit",
    "tests/kernels/linear/test_formats.py": "unit",
    "tests/kernels/test_block_rules.py": "unit",
    "tests/kernels/test_debug.py": "unit",
    "tests/kernels/test_io_docs.py": "unit",
    "tests/kernels/test_io_model.py": "unit",
    "tests/kernels/test_masks.py": "unit",
    "tests/kernels/test_patterns.py": "unit",
    "tests/kernels/test_reference.py": "unit",
    "tests/kernels/test_tiles.py": "unit",
    "tests/patches": "kernel",
    "tests/patches/test_config_file.py": "unit",
    "tests/patches/test_footprint.py": "unit",
    "tests/patches/test_loader.py": "unit",
    "tests/server/api/test_call_schema.py": "unit",
    "tests/server/api/test_lasting_engine.py": "unit",
    "tests/server/api/test_multipart.py": "unit",
    "tests/server/api/test_recent_prompts.py": "unit",
    "tests/server/api/test_response_store.py": "unit",
    "tests/server/api/test_typed.py": "unit",
    "tests/server/chat": "unit",
    "tests/server/chat/test_editing.py": "system",
    "tests/server/cluster/test_options.py": "unit",
    "tests/server/cluster/test_placement.py": "unit",
    "tests/server/cluster/test_prompt_key.py": "unit",
    "tests/server/documents": "unit",
    "tests/server/engine/test_admission.py": "unit",
    "tests/server/engine/test_checkpoints.py": "unit",
    "tests/server/engine/test_chunk_size.py": "unit",
    "tests/server/engine/test_fairness.py": "unit",
    "tests/server/engine/test_flexible.py": "unit",
    "tests/server/engine/test_histories.py": "unit",
    "tests/server/engine/test_host.py": "unit",
    "tests/server/engine/test_host_pages.py": "unit",
    "tests/server/engine/test_prefix_cache.py": "unit",
    "tests/server/engine/test_rank_messages.py": "unit",
    "tests/server/engine/test_rows.py": "unit",
    "tests/server/engine/test_sampler.py": "unit",
    "tests/server/engine/test_sampling_extremes.py": "unit",
    "tests/server/engine/test_scheduler.py": "unit",
    "tests/server/engine/test_speculation.py": "unit",
    "tests/server/engine/test_step_time.py": "unit",
    "tests/server/engine/test_unread.py": "unit",
    "tests/server/test_config.py": "unit",
    "tests/server/test_json_pieces.py": "unit",
    "tests/server/test_plan.py": "unit",
    "tests/server/test_shared_bytes.py": "unit",
    "tests/server/text": "unit",
}
SERIAL_FILES = (
    "tests/server/attacks",
    "tests/server/load",
    "tests/server/engine/test_process_silence.py",
    "tests/server/api/test_network_attacks.py",
)


def tier_of(path: str, marked: set[str]) -> str:
    """The tier of a test in the file `path`, from the repository's root, that is ``marked`` with tiers or with none.

    Raises:
        ValueError: it has no tier, or two.
    """
    if len(marked) > 1:
        raise ValueError(f"{path}: marked {' and '.join(sorted(marked))}; a test has one tier")
    if marked:
        return next(iter(marked))
    places = [place for place in TIER_OF if is_under(path, place)]
    if not places:
        raise ValueError(f"{path}: in no tier; add it to TIER_OF in tests/tiers.py, or mark it {', '.join(TIERS)}")
    return TIER_OF[max(places, key=len)]


def runs_alone(path: str) -> bool:
    """Whether all tests of a file are `serial`."""
    return any(is_under(path, place) for place in SERIAL_FILES)


def is_under(path: str, place: str) -> bool:
    """Whether a path is `place`, or in that folder."""
    return path == place or path.startswith(f"{place}/")


def may_hold(path: str, wanted: str, text: str) -> bool:
    """Whether a file with this `text` can have tests of a tier, or serial ones: it is listed so, or marks tests so."""
    listed = runs_alone(path) if wanted == SERIAL else tier_of(path, set()) == wanted
    return listed or f"pytest.mark.{wanted}" in text


def has_only(path: str, tier: str, text: str) -> bool:
    """Whether all tests of a file with this `text` are of a tier: it is listed so, and marks no test otherwise."""
    others = [*(name for name in TIERS if name != tier), SERIAL, "gpu"]
    return tier_of(path, set()) == tier and not any(f"pytest.mark.{name}" in text for name in others)
