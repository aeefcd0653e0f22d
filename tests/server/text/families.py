"""Small tokenizers built as those of model families are: their normalizers, expressions and special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.server.conftest import BOS, CORPUS, EOS

TEXTS = [
    *CORPUS,
    "It's 12,345.67 or don't; call (555) 0123 or mail a.b@c.example: the rest, the end. the the the",
    "level=info ts=2026-01-02 msg=read id=a1b2c3==x/y+z 文字、そして。數字123，以及 слова, ещё слова\n\n\tи так далее",
]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [BOS, EOS, "<|im_start|>", "<|im_end|>", "[INST]"]


def byte_level(pattern: str | None, *, normalizer: normalizers.Normalizer | None = None) -> tokenizers.Tokenizer:
    """Byte-level BPE behind an expression, or behind GPT-2's own."""
    backend = tokenizers.Tokenizer(models.BPE())
    alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        alone = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), alone])
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = alone
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    backend.post_processor = processors.TemplateProcessing(single=[BOS, "$A"], special_tokens=[(BOS, 0)])
    return backend


def sentence_piece(normalizer: normalizers.Normalizer | None, metaspace: str | None) -> tokenizers.Tokenizer:
    """BPE over whole texts with U+2581 for blanks and bytes for what is unknown, as SentencePiece makes it.

    It is trained behind a splitter, since no token of such a vocabulary goes on behind a word.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.Metaspace(prepend_scheme="never")]
    )
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    trained.train_from_iterator(TEXTS * 3, trainer)
    learnt = trained.get_vocab()
    vocabulary = {token: id_ for id_, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for token in sorted(learnt, key=learnt.__getitem__):
        vocabulary.setdefault(token, len(vocabulary))
    vocabulary.setdefault("▁", len(vocabulary))
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if metaspace is not None:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single=[BOS, "$A"], special_tokens=[(BOS, 0)])
    return backend


def blanks(*before: normalizers.Normalizer) -> normalizers.Normalizer:
    """SentencePiece's blanks, behind other steps."""
    return normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])


FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": lambda: byte_level(None),
    "llama3": lambda: byte_level(LLAMA3),
    "qwen": lambda: byte_level(QWEN, normalizer=normalizers.NFC()),
    "tekken": lambda: byte_level(TEKKEN),
    "llama2": lambda: sentence_piece(blanks(normalizers.Prepend("▁")), None),
    "gemma": lambda: sentence_piece(blanks(), None),
    "mistral": lambda: sentence_piece(None, "first"),
}
