"""Attention policies as values: one class for each, which travels from the request to the masks.

A class has a policy's parameters with their bounds, and says what the engine has to know of it. The schemas of
requests and their documentation are made of its fields and its docstring (`schemas`). A new static policy is one class
here, its name in `AttentionPolicy`, and its mask in `masks`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from longreach.policies.visible import ALL, Visible
from longreach.sizes import KEY_BLOCK, MAX_PROMPT_TOKENS, TILE, whole_tiles

_MAX_LINES = 256
_DEFAULT_RECALL = 0.95
# What the bounds of keys take beside keys and values: the least and the greatest of each channel, for 16 of both.
_BOUNDS_SHARE = 1 / KEY_BLOCK

Tokens = Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
TokensOrNone = Annotated[int, Meta(ge=0, le=MAX_PROMPT_TOKENS)]
Lines = Annotated[tuple[TokensOrNone, ...], Meta(max_length=_MAX_LINES)]


class Policy(msgspec.Struct, frozen=True, tag_field="policy"):
    """What a query is computed under. Equal policies are equal values."""

    is_dense: ClassVar[bool] = False
    """Whether queries see all that the model's own masks let through."""
    is_dynamic: ClassVar[bool] = False
    """Whether the prompt itself decides which keys its queries see."""
    has_mask: ClassVar[bool] = True
    """Whether it narrows the layers' masks beforehand, by a mask of `longreach.policies.masks`."""

    @property
    def name(self) -> str:
        """What the policy is called."""
        return type(self).__struct_config__.tag  # pyright: ignore[reportReturnType]

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that are set, in order, as they take effect."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    @property
    def key(self) -> str:
        """The policy as a string: equal for equal policies, and for no others."""
        return _key(self)

    def visible(self) -> Visible:
        """About how many keys a query sees in the layers that the policy touches."""
        raise NotImplementedError


class RequestPolicy(Policy, frozen=True):
    """A policy that a request may name."""

    query_tile: ClassVar[int] = 1
    """Tokens of which a chunk of the prompt has to hold a multiple, unless it ends the prompt."""

    @property
    def chooses_tiles(self) -> bool:
        """Whether tiles of the prompt are estimated and chosen."""
        return False

    @property
    def answer_budget(self) -> int | None:
        """Keys that a token of the answer reads at most in each KV head of a layer; None for all."""
        return None

    @property
    def answer_sees_all(self) -> bool:
        """Whether the tokens of the answer, and the prompt's last one, see all keys in every layer that does."""
        return False

    def at(self, position: int, prompt_tokens: int) -> StepPolicy:
        """What the query at `position` is computed under, after a prompt of `prompt_tokens`."""
        del position, prompt_tokens
        return self  # pyright: ignore[reportReturnType]

    def borders(self, prompt_tokens: int) -> tuple[int, ...]:
        """Positions, in order, that no chunk may lie across, since queries from there on have another policy."""
        del prompt_tokens
        return ()

    def check_bounds(self, page_bounds: bool) -> None:
        """See whether a server that keeps bounds of keys beside its pages, or does not, can compute it.

        Raises:
            ValueError: it cannot; the message is for whoever asked, behind the name of the field or setting.
        """
        if self.answer_budget is not None and not page_bounds:
            raise ValueError("a decode budget needs bounds of the keys; start the server with --page-bounds")


class Dense(RequestPolicy, frozen=True, tag="dense"):
    """All keys that the model's own masks let through: exact attention, and the default."""

    is_dense: ClassVar[bool] = True
    has_mask: ClassVar[bool] = False

    @property
    def answer_sees_all(self) -> bool:
        return True

    def visible(self) -> Visible:
        return ALL


class Window(RequestPolicy, frozen=True, tag="window"):
    """The last keys and the first ones (StreamingLLM, Xiao et al. 2023). Whatever lies between is not seen."""

    size: Annotated[Tokens, Meta(description="Keys that a query sees, itself counted.")] = 8192
    sinks: Annotated[TokensOrNone, Meta(description="First keys of the prompt that stay visible.")] = 4

    def visible(self) -> Visible:
        return Visible(self.size + self.sinks, 0.0)


class Strided(RequestPolicy, frozen=True, tag="strided"):
    """The last blocks, and one block in so many before them (Sparse Transformer, Child et al. 2019, section 4.2)."""

    stride: Annotated[Tokens, Meta(description="Size of the local part, and distance of the blocks before it.")] = 4096
    per_head: Annotated[
        bool,
        Meta(description="The first half of the heads sees the local part, the other half the blocks at a distance."),
    ] = False

    def __post_init__(self) -> None:
        _round_up(self, "stride")

    def visible(self) -> Visible:
        halves = 0.5 if self.per_head else 1.0
        return Visible(halves * self.stride, halves * TILE / self.stride)


class LocalGlobal(RequestPolicy, frozen=True, tag="local_global"):
    """The last blocks and the first ones (Longformer, Beltagy et al. 2020)."""

    window: Annotated[Tokens, Meta(description="Size of the last blocks, the query's own counted.")] = 8192
    global_tokens: Annotated[TokensOrNone, Meta(description="Size of the first blocks, which every query sees.")] = 128

    def __post_init__(self) -> None:
        _round_up(self, "window", "global_tokens")

    def visible(self) -> Visible:
        return Visible(self.window + self.global_tokens, 0.0)


class BigBird(RequestPolicy, frozen=True, tag="bigbird"):
    """The last blocks, the first ones, and some drawn at random (BigBird, Zaheer et al. 2020)."""

    window: Annotated[Tokens, Meta(description="Size of the last blocks, the query's own counted.")] = 4096
    global_tokens: Annotated[TokensOrNone, Meta(description="Size of the first blocks, which every query sees.")] = 128
    random_blocks: Annotated[
        int,
        Meta(ge=0, le=64, description="Blocks that are drawn, with replacement, for each block of queries."),
    ] = 32
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1, description="The same seed, the same blocks.")] = 0

    def __post_init__(self) -> None:
        _round_up(self, "window", "global_tokens")

    def visible(self) -> Visible:
        return Visible(self.window + self.global_tokens + self.random_blocks * TILE, 0.0)


class VerticalSlash(RequestPolicy, frozen=True, tag="vertical_slash"):
    """Keys at some positions, for all queries, and at some distances (MInference, Jiang et al. 2024)."""

    verticals: Annotated[Lines, Meta(description="Positions, rounded out to blocks.")] = (0,)
    slashes: Annotated[
        Lines, Meta(description="Distances, rounded out to blocks; a query always sees its own block.")
    ] = (0, 128)

    def __post_init__(self) -> None:
        force_setattr(self, "verticals", tuple(sorted(set(self.verticals))))
        force_setattr(self, "slashes", tuple(sorted(set(self.slashes))))

    def visible(self) -> Visible:
        columns = {position // TILE for position in self.verticals}
        diagonals = {0} | {block for x in self.slashes for block in (x // TILE, -(-x // TILE))}
        return Visible((len(columns) + len(diagonals)) * TILE, 0.0)


class Dynamic(RequestPolicy, frozen=True, tag="dynamic"):
    """Key tiles chosen while the prompt is read, by an estimate of where each head's attention lies (XAttention, Xu et
    al. 2025; FlashPrefill, 2026). The beginning, the neighbourhood and the end of the prompt are always read whole, and
    the answer sees everything, or reads a budget of keys, chosen for each of its tokens (Quest, Tang et al. 2024)."""

    is_dynamic: ClassVar[bool] = True
    has_mask: ClassVar[bool] = False
    query_tile: ClassVar[int] = TILE  # what is chosen for a tile of queries depends on where the tile begins

    recall: Annotated[
        Annotated[float, Meta(ge=0.01, le=1)] | None,
        Meta(description="Share of the estimated mass that the chosen tiles hold; 0.95 where no target is given."),
    ] = None
    decode_budget: Annotated[
        Annotated[int, Meta(ge=32, le=MAX_PROMPT_TOKENS)] | None,
        Meta(
            description="Keys that a token of the answer reads at most in each KV head of a layer, rounded down to a "
            "multiple of 16; all if it is not given. The server needs `--page-bounds`."
        ),
    ] = None
    density: Annotated[
        Annotated[float, Meta(ge=0.001, le=1)] | None,
        Meta(description="Share of the tiles that are chosen; the other target in place of `recall`."),
    ] = None
    speedup: Annotated[
        Annotated[float, Meta(ge=1, le=16)] | None,
        Meta(description="How many times faster attention should be, estimate included; the third possible target."),
    ] = None
    estimator: Annotated[
        Literal["auto", "antidiagonal", "moments", "pooled"],
        Meta(
            description="How tiles are estimated. antidiagonal compares mixtures of keys. moments compares means and "
            "variances, and so finds a key that a single query looks for. pooled compares means alone, and is the "
            "cheapest. auto is moments in layers without rotary positions, and antidiagonal in others."
        ),
    ] = "auto"
    dense_below: Annotated[
        TokensOrNone,
        Meta(
            description="Queries before this position use dense attention: "
            "on short prefixes, choosing costs what it saves."
        ),
    ] = 8192
    min_mass: Annotated[
        Annotated[float, Meta(ge=0.01, le=0.9999)] | None,
        Meta(
            description="Share of dense attention's mass that drawn queries of a tile keep; where one would not, the "
            "tile reads more, or all. A token within a `decode_budget` keeps it in each layer for certain, or reads "
            "all. `usage.attention.guarantee` says what was found."
        ),
    ] = None

    def __post_init__(self) -> None:
        given = [name for name in ("recall", "density", "speedup") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` cannot both be set")
        if not given:
            force_setattr(self, "recall", _DEFAULT_RECALL)
        if self.decode_budget is not None:
            force_setattr(self, "decode_budget", self.decode_budget - self.decode_budget % KEY_BLOCK)

    @property
    def chooses_tiles(self) -> bool:
        # Nothing has to be estimated to choose all of them. A recall of 1 is dense attention, for prompts of which only
        # the answers read less.
        return self.recall != 1

    @property
    def answer_budget(self) -> int | None:
        return self.decode_budget

    @property
    def answer_sees_all(self) -> bool:
        return self.decode_budget is None

    def at(self, position: int, prompt_tokens: int) -> StepPolicy:
        if position < prompt_tokens:
            return self
        if self.decode_budget is None or position < self.decode_budget:
            return DENSE
        return SparseDecode(self.decode_budget, self.min_mass)

    def borders(self, prompt_tokens: int) -> tuple[int, ...]:
        # Without a budget there is none: what follows a prompt that chose its keys then sees all anyway.
        return () if self.decode_budget is None else (prompt_tokens, max(prompt_tokens, self.decode_budget))

    def visible(self) -> Visible:
        if self.density is not None:
            return Visible(0.0, self.density, self.dense_below)
        if self.speedup is not None:
            return Visible(0.0, 1 / self.speedup, self.dense_below)
        return ALL  # the prompt alone decides


class SparseDecode(Policy, frozen=True, tag="sparse_decode"):
    """What a token of an answer is computed under that reads at most `budget` keys in each KV head of a layer, or in
    a layer all of them where that does not keep `min_mass` for certain. No request names it: it follows from a policy's
    `answer_budget`."""

    has_mask: ClassVar[bool] = False

    budget: int
    min_mass: float | None = None

    def visible(self) -> Visible:
        return Visible(self.budget, _BOUNDS_SHARE)  # and the bounds of all blocks


AttentionPolicy = Dense | Window | Strided | LocalGlobal | BigBird | VerticalSlash | Dynamic
"""What a request may ask for, as it travels to the engine."""
StepPolicy = AttentionPolicy | SparseDecode
"""What a chunk of a step is computed under."""
POLICIES: tuple[type[RequestPolicy], ...] = get_args(AttentionPolicy)
DENSE = Dense()


@lru_cache(maxsize=256)
def _key(policy: Policy) -> str:
    return repr(policy)


def _round_up(policy: Policy, *sizes: str) -> None:
    """Make these sizes of a new policy whole tiles."""
    for name in sizes:
        force_setattr(policy, name, whole_tiles(getattr(policy, name)))
