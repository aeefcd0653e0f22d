"""A byte-level BPE tokenizer that takes any UTF-8 text, with single digits and a chat template.

Each pre-token is a letter run, one digit, one newline, a punctuation run, or a run of spaces. So a word has the same
ids after a space, a line break, a quote or a bracket, and copying it is copying its ids; text cut at a sentence or a
line tokenizes to the same ids as the whole.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from training.recall.codec import ASSISTANT, BOS, EOS, PAD, SPECIAL_TOKENS, USER

VOCAB_SIZE = 4096
BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID, PAD_ID = range(len(SPECIAL_TOKENS))

SPLIT = r"\p{L}+|\p{N}|\r?\n|[^\s\p{L}\p{N}]|[^\S\r\n]+|\s"

# The system message has no token of its own: it opens the first user turn.
CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set turn = namespace(preface='') -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}
{%- set turn.preface = turn.preface + text_of(message.content) + '\\n\\n' -%}
{%- elif message.role == 'user' -%}
{{- '<|user|>' + turn.preface + text_of(message.content) -}}
{%- set turn.preface = '' -%}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + text_of(message.content) + eos_token -}}
{%- else -%}
{{- raise_exception('unknown role ' + message.role + ': use system, user or assistant') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train the tokenizer on `texts`; deterministic for the same texts in the same order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the texts gave {tokenizer.get_vocab_size()} tokens, not vocab_size={vocab_size}: pass more varied texts"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja so that `AutoTokenizer` loads them."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    # The generic class loads in every transformers release since 4; the name that release 5 writes does not.
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def load(directory: Path) -> Tokenizer:
    """The bare tokenizer of a saved directory, without transformers' wrapper."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
