"""Write the table of slots in docs/caches.md from models' shapes, as the server counts them.

python docs/state_tables.py            # writes the page
python docs/state_tables.py --check    # changes nothing, fails if the page is not what the shapes give
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import generated_page
import torch
from longreach.engine.kv_cache.state_allocator import SLOTS_PER_REQUEST
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.capacity import Demand, readable
from longreach_patches import Footprint, RankLayout, quantized
from transformers import (
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

PAGE = Path(__file__).resolve().parent / "caches.md"
BEGIN, END = "<!-- slots -->\n", "<!-- end of slots -->\n"
CARDS = (80, 141)
# The server's defaults on a GPU of compute capability 9.0.
_PAGE_TOKENS, _STEP_TOKENS, _UTILIZATION, _ARCH = 128, 8192, 0.9, 90


class Served(NamedTuple):
    """A published model, by the numbers of its config.json that count here, and on how many GPUs it is served."""

    config: PretrainedConfig
    gpus: int = 1


def models(card: int) -> dict[str, Served]:
    """The models of the table on GPUs of so many GB."""
    fp8 = Qwen3NextConfig()
    quantized.declare(fp8, None, quantization="fp8")
    return {
        "LiquidAI/LFM2-1.2B": Served(
            Lfm2Config(num_hidden_layers=16, hidden_size=2048, layer_types=_kinds(16, 2, 5, 8, 10, 12, 14))
        ),
        "LiquidAI/LFM2-8B-A1B": Served(
            Lfm2MoeConfig(num_hidden_layers=24, layer_types=_kinds(24, 2, 6, 10, 14, 18, 21))
        ),
        "ibm-granite/granite-4.0-h-small": Served(_granite()),
        "nvidia/NVIDIA-Nemotron-Nano-12B-v2": Served(_nemotron()),
        "allenai/Olmo-Hybrid-7B": Served(OlmoHybridConfig()),
        "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": Served(fp8, 2 if card < 100 else 1),
    }


def _kinds(layers: int, *attending: int, others: str = "conv") -> list[str]:
    return ["full_attention" if index in attending else others for index in range(layers)]


def _granite() -> PretrainedConfig:
    return GraniteMoeHybridConfig(
        num_hidden_layers=40,
        num_key_value_heads=8,
        intermediate_size=768,
        shared_intermediate_size=1536,
        num_local_experts=72,
        num_experts_per_tok=10,
        vocab_size=100352,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        mamba_d_state=128,
        layer_types=_kinds(40, 5, 15, 25, 35, others="linear_attention"),
    )


def _nemotron() -> PretrainedConfig:
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    return NemotronHConfig(
        hidden_size=5120,
        intermediate_size=20480,
        num_attention_heads=40,
        max_position_embeddings=131072,
        mamba_head_dim=80,
        layers_block_type=[kinds[one] for one in "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"],
    )


def render(page: str) -> str:
    """The page with its table made anew."""
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + "\n" + "\n".join(_lines()) + "\n\n" + END + after


def _lines() -> Iterable[str]:
    yield "| model | a state | on | requests at once | copies | they take | tokens in pages |"
    yield "|---|---:|---|---:|---:|---:|---:|"
    for card in CARDS:
        for name, served in models(card).items():
            yield f"| {' | '.join(_row(name, served, card))} |"


def _row(name: str, served: Served, card: int) -> list[str]:
    config, settings = served.config, EngineConfig(model=name)
    layout = RankLayout(tensor_size=served.gpus)
    footprint = Footprint.of(config, torch.bfloat16, _PAGE_TOKENS, layout=layout, arch=_ARCH)
    demand = Demand.of(footprint, config, settings, _STEP_TOKENS)
    room = demand.gpu_room(card << 30, _UTILIZATION)
    fits, states = demand.fit(room), demand.states
    assert states is not None
    running = states.running_slots(room)
    copies = fits.state_slots - running
    return [
        f"`{name}`",
        readable(states.slot_bytes),
        f"{served.gpus} of {card} GB",
        str(running // SLOTS_PER_REQUEST),
        f"{copies:,}",
        readable(copies * states.slot_bytes),
        f"{fits.kv_tokens / 1e6:.2f} million",
    ]


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the models' shapes give")


if __name__ == "__main__":
    main()
