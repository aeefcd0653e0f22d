"""The formats in which models write calls, and how a chat template tells which is its model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from longreach.text.calls import (
    deepseek,
    forced,
    glm,
    harmony,
    hermes,
    hunyuan,
    listed,
    llama,
    minimax,
    mistral,
    pythonic,
    xml_calls,
)
from longreach.text.calls.cursor import Cursor, Steps
from longreach.text.calls.offered import Offered


@dataclass(frozen=True)
class CallFormat:
    """How calls are written in the text of an answer.

    Attributes:
        name: as `--tool-call-format` has it.
        models: that write so, for the documentation.
        example: a call of `look` with the argument `city`.
        opens: marks that begin calls.
        read: reads what follows a mark; its last argument is the mark.
        evidence: alternatives of texts that stand together in the chat templates of these models, and nowhere else.
        unmarked: an answer may also begin with calls without any mark.
        nests: what stands in a call may look like another one, as in the text of a file that is to be written. It may
            not where quotes would end the string that it stands in.
        read_exact: reads what a grammar of ours lets follow, where `read` knows more; None where both are the same.
    """

    name: str
    models: str
    example: str
    opens: tuple[str, ...]
    read: Callable[[Cursor, Offered, str], Steps[None]]
    evidence: tuple[tuple[str, ...], ...] = ()
    unmarked: bool = False
    nests: bool = False
    read_exact: Callable[[Cursor, Offered, str], Steps[None]] | None = None

    @property
    def exact(self) -> CallFormat:
        """The format as a grammar of ours has it."""
        return self if self.read_exact is None else replace(self, read=self.read_exact)

    def is_seen_in(self, chat_template: str) -> bool:
        """Whether a chat template is of a model that writes calls so."""
        return any(all(text in chat_template for text in texts) for texts in self.evidence)


# In the order in which they are looked for.
MARKED = (
    CallFormat(
        "seed_oss",
        "Seed-OSS",
        "<seed:tool_call>\n<function=look>\n<parameter=city>Bonn</parameter>\n</function>\n</seed:tool_call>",
        (xml_calls.SEED_OPEN,),
        xml_calls.read,
        evidence=(("<seed:tool_call>",),),
        nests=True,
    ),
    CallFormat(
        "minimax_m2",
        "MiniMax-M2",
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Bonn</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        (minimax.OPEN,),
        minimax.read,
        evidence=((minimax.OPEN,),),
        nests=True,
    ),
    CallFormat(
        "hy_v3",
        "Hy3",
        "<tool_calls>\n<tool_call>look<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>\n"
        "</tool_calls>",
        (hunyuan.OPEN, hunyuan.OPEN_SOURCE),
        hunyuan.read_tags,
        evidence=(("<tool_sep",),),
        nests=True,
    ),
    CallFormat(
        "hunyuan",
        "Hunyuan A13B, and 0.5B to 7B",
        '<tool_calls>[{"name": "look", "arguments": {"city": "Bonn"}}]</tool_calls>',
        (hunyuan.OPEN,),
        hunyuan.read,
        evidence=((hunyuan.OPEN,),),
    ),
    CallFormat(
        "olmo3",
        "OLMo 3",
        '<function_calls>\nlook(city="Bonn")\n</function_calls>',
        (pythonic.OPEN,),
        pythonic.read,
        evidence=((pythonic.OPEN,),),
    ),
    CallFormat(
        "granite",
        "Granite 3.0 to 3.3",
        '<|tool_call|>[{"name": "look", "arguments": {"city": "Bonn"}}]',
        (listed.GRANITE, listed.HERMES),
        listed.read_granite,
        evidence=((listed.GRANITE, "<|start_of_role|>"),),
    ),
    CallFormat(
        "phi4_mini",
        "Phi-4-mini",
        '<|tool_call|>[{"name": "look", "arguments": {"city": "Bonn"}}]<|/tool_call|>',
        (listed.PHI, listed.FUNCTOOLS),
        listed.read_phi,
        evidence=(("<|tool|>",),),
    ),
    CallFormat(
        "toolcall",
        "Llama Nemotron, Nemotron Nano 2",
        '<TOOLCALL>[{"name": "look", "arguments": {"city": "Bonn"}}]</TOOLCALL>',
        (listed.TOOLCALL,),
        listed.read_toolcall,
        evidence=((listed.TOOLCALL,),),
    ),
    CallFormat(
        "cohere",
        "Command R7B, Command A",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": {"city": "Bonn"}}\n]'
        "<|END_ACTION|>",
        (listed.ACTION,),
        listed.read_cohere,
        evidence=((listed.ACTION,),),
    ),
    CallFormat(
        "apertus",
        "Apertus",
        '<|tools_prefix|>[{"look": {"city": "Bonn"}}]<|tools_suffix|>',
        (listed.PREFIX,),
        listed.read_apertus,
        evidence=((listed.PREFIX,),),
    ),
    CallFormat(
        "qwen3_coder",
        "Qwen3-Coder, Qwen 3.5, Nemotron 3 Nano",
        "<tool_call>\n<function=look>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>",
        (hermes.OPEN, xml_calls.FUNCTION),
        xml_calls.read,
        evidence=(("<tool_call>", "<function="),),
        nests=True,
    ),
    CallFormat(
        "glm",
        "GLM 4.5, 4.6, 4.7",
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>",
        (hermes.OPEN,),
        glm.read,
        evidence=(("<tool_call>", "<arg_key>"),),
        nests=True,
    ),
    CallFormat(
        "hermes",
        "Hermes 2 and 3, Qwen 2.5, Qwen 3, QwQ, SmolLM3, Granite 4",
        '<tool_call>\n{"name": "look", "arguments": {"city": "Bonn"}}\n</tool_call>',
        (hermes.OPEN,),
        hermes.read,
        evidence=(("<tool_call>",),),
    ),
    CallFormat(
        "deepseek",
        "DeepSeek V3, R1, V3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"city": "Bonn"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        (deepseek.OPEN,),
        deepseek.read,
        evidence=((deepseek.OPEN,),),
    ),
    CallFormat(
        "mistral",
        "Mistral 7B v0.3, Nemo, Large, Small 3, Devstral, Magistral, Ministral 3",
        '[TOOL_CALLS]look[ARGS]{"city": "Bonn"}',
        (mistral.OPEN,),
        mistral.read,
        evidence=((mistral.OPEN,),),
    ),
    CallFormat(
        "llama3_json",
        "Llama 3.1, 3.2, 3.3",
        '{"name": "look", "parameters": {"city": "Bonn"}}',
        (llama.OPEN,),
        llama.read,
        evidence=(('"parameters": ', "<|start_header_id|>"), ('"parameters": ', llama.OPEN)),
        unmarked=True,
        read_exact=llama.read_exact,
    ),
)

HARMONY = CallFormat(
    "harmony",
    "gpt-oss",
    '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Bonn"}<|call|>',
    (harmony.CHANNEL, harmony.START),
    harmony.read,
    evidence=((harmony.CHANNEL, harmony.MESSAGE),),
    nests=True,
)
FORMATS = (HARMONY, *MARKED)

# Answers whose grammar makes them calls.
NAMED = CallFormat("named", "", "", (), forced.read_named, unmarked=True)
LISTED = CallFormat("listed", "", "", (), forced.read_list, unmarked=True)


def format_named(name: str) -> CallFormat:
    """The format of this name.

    Raises:
        ValueError: there is none; names those that there are.
    """
    found = next((one for one in FORMATS if one.name == name), None)
    if found is None:
        raise ValueError(f"there is no such format; those that are known: {', '.join(one.name for one in FORMATS)}")
    return found
