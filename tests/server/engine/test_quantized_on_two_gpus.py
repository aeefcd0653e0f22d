"""Quantised models on two GPUs, by parts of the weights or of the tokens, score a prompt as one GPU does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from longreach.engine.messages import Generate, Sampling
from transformers import PretrainedConfig

from tests.pairwise import daily
from tests.patches.families.configs import config_of, random_model
from tests.patches.quantized import writers
from tests.patches.quantized.test_layouts import LAYOUTS
from tests.server.engine.driving import drain
from tests.server.engine.test_families_on_gpu import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# Mean differences of log-probabilities. Sums over ranks are rounded to bf16 and may choose other experts; activations
# of FP8 are rounded to three bits of a fraction, by rows of other lengths.
ROUNDING, ROUNDING_FP8 = 0.15, 0.4


def sized(family: str) -> PretrainedConfig:
    """Halves of every projection have whole blocks of 128 and groups of 32."""
    config = config_of(family)
    config.hidden_size, config.head_dim, config.num_key_value_heads = 256, 64, 4
    config.intermediate_size = 256
    return config


def layout_writer(family: str, layout: str) -> Callable[[Path], object]:
    writer, declared, _ = LAYOUTS[layout]
    return lambda path: writers.write(path, random_model(sized(family), torch.float32), writer, declared)


MODELS: dict[str, Callable[[Path], object]] = {
    f"{family}, {layout}": layout_writer(family, layout)
    for family in ("llama", "mixtral")
    for layout in ("fp8", "fp8 by tensor", "float-quantized by channel", "pack-quantized", "gptq", "awq")
} | {"gpt_oss": lambda path: writers.write_gpt_oss(path, random_model(sized("gpt_oss"), torch.float32))}


@functools.cache
def prompts() -> tuple[list[int], ...]:
    """One that context ranks share by tokens, and one that they do not."""
    draws = ((length, torch.Generator().manual_seed(length)) for length in (300, 20))
    return tuple(torch.randint(5, 512, (length,), generator=draw).tolist() for length, draw in draws)


def scores(model: Path, **more: object) -> torch.Tensor:
    """Log-probabilities of the prompts' tokens."""
    engine = build(model, "cuda", dtype="bfloat16", **more)
    try:
        for index, prompt in enumerate(prompts()):
            how = Sampling(temperature=0.0)
            request = Generate(request_id=str(index), prompt=prompt, max_tokens=4, prompt_logprobs=0, sampling=how)
            assert engine.submit(request) is None
        tokens, updates, failures = drain(engine)
    finally:
        engine.close()
    assert not failures
    assert all(len(answer) == 4 for answer in tokens.values())
    told = [score.logprob for name in sorted(updates) for one in updates[name] for score in one.prompt_logprobs]
    assert len(told) == sum(len(prompt) - 1 for prompt in prompts())
    return torch.tensor(told)


ALWAYS = ("llama, fp8", "mixtral, pack-quantized", "gpt_oss")


@pytest.mark.parametrize("share", ["tensor", "context"])
@pytest.mark.parametrize("name", [*ALWAYS, *daily([name for name in MODELS if name not in ALWAYS], 2)])
def test_two_gpus_score_as_one(tmp_path: Path, name: str, share: str) -> None:
    MODELS[name](tmp_path)
    one, two = scores(tmp_path), scores(tmp_path, **{f"{share}_parallel_size": 2})
    assert one.std() > 1, "a model that tells tokens apart"
    assert (one - two).abs().mean() < (ROUNDING_FP8 if "fp8" in name or "float" in name else ROUNDING)
