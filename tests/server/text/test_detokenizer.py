"""Pieces of text against the whole decode, for both kinds of tokenizer and any bytes."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from longreach.errors import TokenizerError
from longreach.text.detokenizer import Detokenizer, TokenBytes
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

BYTE_CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE with merges inside characters, special tokens and tokens added as text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=BYTE_CHARACTERS, show_progress=False
    )
    backend.train_from_iterator(["the owl 🦉🦉🦉 日本語日本語 über über"] * 9, trainer)
    backend.add_tokens([AddedToken("<plain>"), AddedToken("two words"), AddedToken("｜wide｜")])
    return backend


def sentencepiece_like(decoder: object) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁the", "▁", "the", "▁owl", "s", "▁▁", "é", "日"]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoder  # type: ignore[assignment]
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
SENTENCEPIECE = {
    "llama": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(LLAMA),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}


def _id(backend: tokenizers.Tokenizer, token: str) -> int:
    id_ = backend.token_to_id(token)
    assert id_ is not None
    return id_


def streamed(backend: tokenizers.Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(TokenBytes(backend))
    pieces = [detokenizer.push(id_) for id_ in ids]
    return "".join(pieces) + detokenizer.flush()


@given(data=st.data())
def test_byte_level_equals_the_whole_decode_for_any_tokens(
    byte_level: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.get_vocab_size() + 3), max_size=40))
    assert streamed(byte_level, ids) == byte_level.decode(ids, skip_special_tokens=True)


@given(raw=st.binary(max_size=64))
@example(raw=b"\xf0\x9f\xa6\x89")
@example(raw=b"\xf0\x9f\xa6")
@example(raw=b"\xf0\x80\x80\x80\xed\xa0\x80\xc0\xaf\xff\xfe\x80a")
def test_byte_level_equals_the_whole_decode_for_any_bytes(byte_level: tokenizers.Tokenizer, raw: bytes) -> None:
    characters = dict(zip(_gpt2_order(), BYTE_CHARACTERS, strict=True))
    ids = [_id(byte_level, characters[byte]) for byte in raw]
    assert streamed(byte_level, ids) == byte_level.decode(ids) == raw.decode("utf-8", "replace")


def _gpt2_order() -> list[int]:
    """The byte that each of the sorted characters stands for."""
    printable = [b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xAD)]
    return printable + [b for b in range(256) if b not in printable]


@given(text=st.text(max_size=30))
def test_no_piece_ever_has_half_a_character(byte_level: tokenizers.Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(TokenBytes(byte_level))
    ids = byte_level.encode(text).ids
    pieces = [detokenizer.push(id_) for id_ in ids]
    assert "".join(pieces) == byte_level.decode(ids)
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert detokenizer.flush() == ""


def test_an_emoji_of_several_tokens_comes_in_one_piece(byte_level: tokenizers.Tokenizer) -> None:
    detokenizer = Detokenizer(TokenBytes(byte_level))
    ids = byte_level.encode("👩").ids
    assert len(ids) == 3
    assert [detokenizer.push(id_) for id_ in ids] == ["", "", "👩"]


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@given(data=st.data())
def test_sentencepiece_continues_the_prompt(kind: str, data: st.DataObject) -> None:
    backend = sentencepiece_like(SENTENCEPIECE[kind])
    plain = range(259, backend.get_vocab_size())
    characters = st.sampled_from("aß日🦉").map(lambda c: [3 + byte for byte in c.encode()])
    runs = st.one_of(st.sampled_from(plain).map(lambda id_: [id_]), st.just([1]), characters)
    ids = [id_ for run in data.draw(st.lists(runs, max_size=20)) for id_ in run]
    anchor = _id(backend, "the")
    assert "the" + streamed(backend, ids) == backend.decode([anchor, *ids], skip_special_tokens=True)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_sentencepiece_keeps_the_space_between_prompt_and_answer(kind: str) -> None:
    backend = sentencepiece_like(SENTENCEPIECE[kind])
    ids = [_id(backend, piece) for piece in ("▁the", "▁owl", "s", "▁", "▁▁", "é")]
    assert streamed(backend, ids) == " the owls   é"


@given(raw=st.binary(max_size=12))
def test_sentencepiece_keeps_valid_characters_of_an_invalid_run(raw: bytes) -> None:
    backend = sentencepiece_like(SENTENCEPIECE["llama"])
    assert streamed(backend, [3 + byte for byte in raw]) == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder(), None])
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: object) -> None:
    with pytest.raises(TokenizerError, match="decoder"):
        TokenBytes(sentencepiece_like(decoder))


def test_a_decoder_that_strips_the_end_is_refused() -> None:
    with pytest.raises(TokenizerError, match="Strip"):
        TokenBytes(sentencepiece_like(decoders.Sequence([*LLAMA, decoders.Strip(" ", 0, 1)])))
