"""Write the table of docs/windows.md from models' shapes, as the server counts their pages.

python docs/window_tables.py            # writes the page
python docs/window_tables.py --check    # changes nothing, fails if the page is not what the shapes give
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import generated_page
import torch
from longreach.engine.kv_cache.groups import PageGroups
from longreach_patches import PageShape
from transformers import (
    Cohere2Config,
    Exaone4Config,
    Gemma3TextConfig,
    GptOssConfig,
    Olmo3Config,
    PretrainedConfig,
)

PAGE = Path(__file__).resolve().parent / "windows.md"
BEGIN, END = "<!-- bytes of requests -->\n", "<!-- end -->\n"
LENGTHS = (32768, 131072)
# The server's defaults on a GPU.
_PAGE_TOKENS, _STEP_TOKENS = 128, 8192


def _heads(layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def models() -> dict[str, PretrainedConfig]:
    """Published models, by the numbers of their config.json that count here."""
    return {
        "google/gemma-3-4b-it": Gemma3TextConfig(**_heads(34, 8, 4, 256), sliding_window=1024),
        "google/gemma-3-12b-it": Gemma3TextConfig(**_heads(48, 16, 8, 256), sliding_window=1024),
        "google/gemma-3-27b-it": Gemma3TextConfig(**_heads(62, 32, 16, 128), sliding_window=1024),
        "openai/gpt-oss-20b": GptOssConfig(**_heads(24, 64, 8, 64), sliding_window=128),
        "openai/gpt-oss-120b": GptOssConfig(**_heads(36, 64, 8, 64), sliding_window=128),
        "allenai/Olmo-3-7B-Instruct": Olmo3Config(**_heads(32, 32, 32, 128), sliding_window=4096),
        "CohereLabs/c4ai-command-r7b-12-2024": Cohere2Config(**_heads(32, 32, 8, 128), sliding_window=4096),
        "LGAI-EXAONE/EXAONE-4.0-32B": Exaone4Config(
            **_heads(64, 40, 8, 128), sliding_window=4096, sliding_window_pattern=4
        ),
    }


def render(page: str) -> str:
    """The page with its table made anew."""
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + "\n" + "\n".join(_lines()) + "\n\n" + END + after


def _lines() -> Iterable[str]:
    lengths = [f"{length // 1024}K: {what}" for length in LENGTHS for what in ("whole pages", "by group")]
    yield "| " + " | ".join(["model", "layers: all + window", "window", *lengths, "times"]) + " |"
    yield "|" + "---|" * 2 + "---:|" * (len(lengths) + 2)
    for name, config in models().items():
        yield "| " + " | ".join(_row(name, config)) + " |"


def _row(name: str, config: PretrainedConfig) -> list[str]:
    whole, divided = (PageShape.of(config, torch.bfloat16, _PAGE_TOKENS, divided=parts) for parts in (False, True))
    groups = PageGroups(_PAGE_TOKENS, divided.windows, _STEP_TOKENS)
    full = sum(len(group.layers) for group in divided.groups if group.window is None)
    [window] = {group.window for group in divided.groups if group.window is not None}
    cells = [f"`{name}`", f"{full} + {len(divided.layers) - full}", f"{window:,}"]
    before = after = 0
    for length in LENGTHS:
        before, after = whole.bytes_per_token * length, groups.ids_for(length) * divided.bytes_per_page
        cells += [f"{before / 2**30:.2f} GiB", f"{after / 2**30:.2f} GiB"]
    return [*cells, f"{before / after:.1f}"]


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the models' shapes give")


if __name__ == "__main__":
    main()
