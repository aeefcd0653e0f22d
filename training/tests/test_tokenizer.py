"""Any UTF-8 text survives the tokenizer exactly; the chat template says what training saw."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training import tokenizer as bpe

AWKWARD = (
    "",
    " ",
    "\n\n\n",
    " leading and trailing  ",
    "spaces   inside \t tabs\t\t\r\nand\rreturns",
    "don't 'S , . ! ? n't he 's",  # what clean_up_tokenization_spaces would alter
    "48213 007 1e-9 ½ ٣٤",
    "naïve café Ångström ﬁ",
    "日本語のテキスト。中文，한국어",
    "\N{FAMILY}\N{ZERO WIDTH JOINER}\N{EMOJI MODIFIER FITZPATRICK TYPE-3} \N{COMBINING ACUTE ACCENT}e",
    "\x00\x01\x7f\x85\u2028\ufeff\U0010ffff",
)


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_directory)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == bpe.BOS_ID
    assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_round_trips(bare_tokenizer: Tokenizer, text: str) -> None:
    ids = bare_tokenizer.encode(text, add_special_tokens=False).ids
    if not any(mark in text for mark in bpe.SPECIAL_TOKENS):
        assert not set(ids) & set(range(len(bpe.SPECIAL_TOKENS)))
    assert bare_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_each_digit_and_newline_is_one_token(bare_tokenizer: Tokenizer) -> None:
    tokens = bare_tokenizer.encode("a 48213\n\nb", add_special_tokens=False)
    digits = [bare_tokenizer.decode([i]) for i in tokens.ids]
    assert digits == ["a", " ", "4", "8", "2", "1", "3", "\n", "\n", "b"]


def test_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_tokens_to_ids(list(bpe.SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 4)
    assert len(tokenizer) == bpe.VOCAB_SIZE


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>Be short.\n\nHello there<|assistant|>Yes?<|eos|><|user|>Bye<|assistant|>"
    with pytest.raises(TemplateError, match="unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_committed_template_is_the_one_in_the_code(model_directory: Path) -> None:
    assert (model_directory / "chat_template.jinja").read_text().strip() == bpe.CHAT_TEMPLATE.strip()


def test_training_needs_enough_text() -> None:
    with pytest.raises(ValueError, match="pass more varied texts"):
        bpe.build(["too little text"])


@pytest.mark.parametrize("before", ["", " ", "\n", "    ", '"', "(", "a-", "x_", "7", ".\n"])
@pytest.mark.parametrize("word", ["nebur", "Kettle", "satellite", "größe"])
def test_a_word_has_the_same_tokens_wherever_it_stands(bare_tokenizer: Tokenizer, before: str, word: str) -> None:
    alone, ids = (bare_tokenizer.encode(text, add_special_tokens=False).ids for text in (word, before + word))
    assert ids[len(ids) - len(alone) :] == alone
