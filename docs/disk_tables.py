"""Write the table of documents on disk in docs/caches.md from models' shapes, as the server counts bytes.

python docs/disk_tables.py            # writes the page
python docs/disk_tables.py --check    # changes nothing, fails if the page is not what the shapes give
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import generated_page
import torch
from longreach.engine.kv_cache.borders import is_worth_keeping
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.state_borders import BorderRule
from longreach.engine.requests.page_hold import PageHold
from longreach_patches import PageShape, StateShape
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

PAGE = Path(__file__).resolve().parent / "caches.md"
BEGIN, END = "<!-- documents on disk -->\n", "<!-- end of documents on disk -->\n"
TOKENS = 131072
DRIVES = (1.5, 3.5, 7.0)  # GB/s
# The server's defaults on a GPU.
_PAGE_TOKENS, _STEP_TOKENS = 128, 8192
_DTYPES = {"16 bits": torch.bfloat16, "FP8": torch.float8_e4m3fn}


def models() -> dict[str, PretrainedConfig]:
    """Published models, by the numbers of their config.json that count here."""
    return {
        "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(**_heads(32, 32, 8, 128)),
        "Qwen/Qwen3-8B": Qwen3Config(**_heads(36, 32, 8, 128)),
        "Qwen/Qwen3-30B-A3B-Instruct-2507": Qwen3MoeConfig(**_heads(48, 32, 4, 128)),
        "openai/gpt-oss-20b": GptOssConfig(**_heads(24, 64, 8, 64), sliding_window=128),
        "google/gemma-3-12b-it": Gemma3TextConfig(**_heads(48, 16, 8, 256), sliding_window=1024),
        "Qwen/Qwen3-Next-80B-A3B-Instruct": Qwen3NextConfig(),
        "Qwen/Qwen3.5-9B": Qwen3_5TextConfig(),
    }


def _heads(layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


class OnDisk(NamedTuple):
    """Bytes of a document."""

    a_token: int  # of all layers that attend
    written: int  # pages, those of windows that are kept, and copies of states
    read: int  # by a question about it: pages that its tokens can see, and one copy of the state


def on_disk(config: PretrainedConfig, dtype: torch.dtype, tokens: int) -> OnDisk:
    """What a document of so many tokens takes on disk."""
    shape = PageShape.of(config, dtype, _PAGE_TOKENS, divided=True)
    groups = PageGroups(_PAGE_TOKENS, shape.windows, _STEP_TOKENS)
    border = groups.pages_for(tokens)
    seen = sum(border - groups.first(group, border) for group in range(len(shape.windows)))
    states, copies = StateShape.of(config, torch.bfloat16), 0
    if states is not None:
        rule = BorderRule()
        copies = len(rule.borders(tokens, _PAGE_TOKENS)) + tokens // rule.spacing(tokens, _PAGE_TOKENS)
    state = 0 if states is None else states.bytes_per_slot
    read: Any = SimpleNamespace(prompt_tokens=tokens, hold=PageHold())
    kept = sum(
        group in groups.full or is_worth_keeping(groups, read, group, page)
        for group in range(len(shape.windows))
        for page in range(border)
    )
    return OnDisk(
        PageShape.of(config, dtype, _PAGE_TOKENS).bytes_per_token,
        kept * shape.bytes_per_page + copies * state,
        seen * shape.bytes_per_page + state,
    )


def render(page: str) -> str:
    """The page with its table made anew."""
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + "\n" + "\n".join(_lines()) + "\n\n" + END + after


def _lines() -> Iterable[str]:
    drives = [f"{drive:g} GB/s" for drive in DRIVES]
    yield "| " + " | ".join(["model", "pages", "KiB a token", "files", "read of them", *drives]) + " |"
    yield "|---|---|" + "---:|" * (3 + len(drives))
    for name, config in models().items():
        for kind, dtype in _DTYPES.items():
            takes = on_disk(config, dtype, TOKENS)
            seconds = [f"{takes.read / drive / 1e9:.1f} s" for drive in DRIVES]
            sizes = [f"{takes.a_token / 1024:g}", *(f"{size / 2**30:.1f} GiB" for size in (takes.written, takes.read))]
            yield "| " + " | ".join([f"`{name}`", kind, *sizes, *seconds]) + " |"


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the models' shapes give")


if __name__ == "__main__":
    main()
