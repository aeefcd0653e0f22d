"""Attention policies as requests and settings name them: which keys a query sees.

Each policy is one class, and its fields are its parameters: from them come the checks, the reference, the list of
`GET /v1/attention/policies`, and the meaning of the short form, `window:4096:4`: its parts are the parameters in order.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, core_schema

from longreach.engine.messages import AttentionPolicy
from longreach.util.strict_models import MAX_PROMPT_TOKENS, StrictModel, invalid

# Of the block patterns: `longreach_kernels.masks.block_rules.BLOCK`, which is not imported here, since it loads torch.
BLOCK = 128
KEYS = 16  # chosen together in decodes: `longreach_kernels.sparse.BLOCK`
MAX_LINES = 256
SHORT_FORM = re.compile(r"[a-z_]{1,32}(:[0-9a-z.,]{1,2048}){0,8}")


class Range:
    """The bounds of a number, told together where one is passed."""

    def __init__(self, least: float, most: float) -> None:
        self.least, self.most = least, most

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "minimum": self.least, "maximum": self.most}

    def _check(self, value: float) -> float:
        if not self.least <= value <= self.most:
            raise invalid(f"must be from {self.least} to {self.most}, got {str(value)[:64]}")
        return value


Tokens = Annotated[int, Range(1, MAX_PROMPT_TOKENS)]
TokensOrNone = Annotated[int, Range(0, MAX_PROMPT_TOKENS)]
Budget = Annotated[int, Range(32, MAX_PROMPT_TOKENS)]
Lines = Annotated[list[Annotated[int, Range(0, MAX_PROMPT_TOKENS)]], Field(max_length=MAX_LINES)]


class Policy(StrictModel):
    """Base of the policies, whose first field is their name, `policy`."""

    IN_BLOCKS: ClassVar[tuple[str, ...]] = ()  # sizes that are rounded up to whole blocks

    @classmethod
    def name(cls) -> str:
        """What the policy is called."""
        return get_args(cls.model_fields["policy"].annotation)[0]

    @classmethod
    def parameters(cls) -> list[str]:
        """Its parameters, in order."""
        return list(cls.model_fields)[1:]

    def resolve(self) -> AttentionPolicy:
        """What the engine is told: all parameters, as they take effect."""
        found: list[tuple[str, Any]] = []
        for name in self.parameters():
            value = getattr(self, name)
            if value is None:
                continue
            if name in self.IN_BLOCKS:
                value = -(-value // BLOCK) * BLOCK
            found.append((name, tuple(sorted(set(value))) if isinstance(value, list) else value))
        return AttentionPolicy(self.name(), tuple(found))


class DensePolicy(Policy):
    """All keys that the model's own masks let through: exact attention, and the default."""

    policy: Literal["dense"]


class WindowPolicy(Policy):
    """The last keys and the first ones (StreamingLLM, Xiao et al. 2023). Whatever lies between is not seen."""

    policy: Literal["window"]
    size: Tokens = Field(8192, description="Keys that a query sees, itself counted.")
    sinks: TokensOrNone = Field(4, description="First keys of the prompt that stay visible.")


class AShapePolicy(Policy):
    """The same shape with more first keys, as MInference (Jiang et al. 2024) calls and uses it."""

    policy: Literal["a_shape"]
    sinks: TokensOrNone = Field(1024, description="First keys of the prompt that stay visible.")
    window: Tokens = Field(8192, description="Keys that a query sees, itself counted.")


class StridedPolicy(Policy):
    """The last blocks, and one block in so many before them (Sparse Transformer, Child et al. 2019, section 4.2)."""

    IN_BLOCKS = ("stride",)

    policy: Literal["strided"]
    stride: Tokens = Field(4096, description="Size of the local part, and distance of the blocks before it.")
    per_head: bool = Field(
        False, description="The first half of the heads sees the local part, the other half the blocks at a distance."
    )


class LocalGlobalPolicy(Policy):
    """The last blocks and the first ones (Longformer, Beltagy et al. 2020)."""

    IN_BLOCKS = ("window", "global_tokens")

    policy: Literal["local_global"]
    window: Tokens = Field(8192, description="Size of the last blocks, the query's own counted.")
    global_tokens: TokensOrNone = Field(128, description="Size of the first blocks, which every query sees.")


class BigBirdPolicy(Policy):
    """The last blocks, the first ones, and some drawn at random (BigBird, Zaheer et al. 2020)."""

    IN_BLOCKS = ("window", "global_tokens")

    policy: Literal["bigbird"]
    window: Tokens = Field(4096, description="Size of the last blocks, the query's own counted.")
    global_tokens: TokensOrNone = Field(128, description="Size of the first blocks, which every query sees.")
    random_blocks: Annotated[int, Range(0, 64)] = Field(
        32, description="Blocks that are drawn, with replacement, for each block of queries."
    )
    seed: Annotated[int, Range(0, 2**31 - 1)] = Field(0, description="The same seed, the same blocks.")


class VerticalSlashPolicy(Policy):
    """Keys at some positions, for all queries, and at some distances (MInference, Jiang et al. 2024)."""

    policy: Literal["vertical_slash"]
    verticals: Lines = Field([0], description="Positions, rounded out to blocks.")
    slashes: Lines = Field([0, 128], description="Distances, rounded out to blocks; a query always sees its own block.")


class DynamicPolicy(Policy):
    """Key tiles chosen while the prompt is read, by an estimate of where each head's attention lies (XAttention, Xu et
    al. 2025; FlashPrefill, 2026). The beginning, the neighbourhood and the end of the prompt are always read whole, and
    the answer sees everything, or reads a budget of keys, chosen for each of its tokens (Quest, Tang et al. 2024)."""

    policy: Literal["dynamic"]
    recall: Annotated[float, Range(0.01, 1)] | None = Field(
        None, description="Share of the estimated mass that the chosen tiles hold; 0.95 where no target is given."
    )
    decode_budget: Budget | None = Field(
        None,
        description="Keys that a token of the answer reads at most in each KV head of a layer, rounded down to a "
        "multiple of 16; all if it is not given. The server needs `--page-bounds`.",
    )
    density: Annotated[float, Range(0.001, 1)] | None = Field(
        None, description="Share of the tiles that are chosen; the other target in place of `recall`."
    )
    speedup: Annotated[float, Range(1, 16)] | None = Field(
        None, description="How many times faster attention should be, estimate included; the third possible target."
    )
    estimator: Literal["auto", "antidiagonal", "moments", "pooled"] = Field(
        "auto",
        description="antidiagonal compares mixtures of keys, moments their means and variances, which also shows a key "
        "that a single query looks for, and pooled their means alone, which is the cheapest; auto is moments in layers "
        "without rotary positions and antidiagonal in the others.",
    )
    dense_below: TokensOrNone = Field(
        8192,
        description="Queries before this position see everything: so early, choosing takes the time that it saves.",
    )

    @model_validator(mode="after")
    def _check_target(self) -> DynamicPolicy:
        given = [name for name in ("recall", "density", "speedup") if getattr(self, name) is not None]
        if len(given) > 1:
            raise invalid(f"`{given[0]}` and `{given[1]}` cannot both be set")
        if not given:
            self.recall = 0.95
        if self.decode_budget is not None:
            self.decode_budget -= self.decode_budget % KEYS
        return self


POLICIES: tuple[type[Policy], ...] = (
    DensePolicy,
    WindowPolicy,
    AShapePolicy,
    StridedPolicy,
    LocalGlobalPolicy,
    BigBirdPolicy,
    VerticalSlashPolicy,
    DynamicPolicy,
)
BY_NAME = {kind.name(): kind for kind in POLICIES}


def policy_of(value: object) -> Policy:
    """A policy from a request's JSON or from its short form.

    Raises:
        PydanticCustomError, ValidationError: it is none; names the parameter and its bounds.
    """
    if isinstance(value, str):
        value = _from_text(value)
    if not isinstance(value, dict):
        raise invalid("must be an object with a `policy`, or a text such as window:4096:4", "invalid_type")
    name = value.get("policy")
    if not isinstance(name, str) or name not in BY_NAME:
        raise _fault("policy", f"must be one of {', '.join(BY_NAME)}", name)
    return BY_NAME[name].model_validate(value)


def policy_with(name: str, parameters: dict[str, str]) -> Policy:
    """A policy from texts, as the parameters of a URL are.

    Raises:
        PydanticCustomError, ValidationError: as `policy_of`.
    """
    kind = BY_NAME.get(name)
    if kind is None:
        return policy_of({"policy": name})
    return policy_of({"policy": name} | {key: _typed(kind, key, text) for key, text in parameters.items()})


def _from_text(text: str) -> dict[str, Any]:
    if SHORT_FORM.fullmatch(text) is None:
        raise invalid("must be an object with a `policy`, or a text such as window:4096:4")
    name, *parts = text.split(":")
    kind = BY_NAME.get(name)
    names = [] if kind is None else kind.parameters()
    if kind is not None and len(parts) > len(names):
        shape = ":".join([name, *(part.upper() for part in names)])
        raise invalid(f"`{name}` has {len(names)} parameters: {shape}")
    return {"policy": name} | {key: _typed(kind, key, part) for key, part in zip(names, parts, strict=False)}


def _typed(kind: type[Policy] | None, name: str, text: str) -> object:
    """A parameter's value; what is of no type that it could have stays as it is, to be refused as others would be."""
    field = None if kind is None else kind.model_fields.get(name)
    if field is not None and isinstance(field.get_default(), list):
        return [_number(part) for part in text.split(",")] if text else []
    return {"true": True, "false": False}.get(text, _number(text))


def _number(text: str) -> int | float | str:
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]{0,9}\.[0-9]{1,9}", text) else text


def _fault(name: str, message: str, value: object) -> ValidationError:
    detail = InitErrorDetails(type=invalid(message), loc=(name,), input=value)
    return ValidationError.from_exception_data("attention", [detail])
