"""One request inside the engine: its tokens, how many of them are computed, and the pages that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import FinishReason, Generate


@dataclass(eq=False)
class Request:
    """A sequence that grows: the prompt, then what was generated.

    There are no phases. `computed` tokens have their keys and values in pages; the rest are wanted. When all are
    computed the model's last row gives the next token, which is then wanted in turn. While it runs, a request has a
    `row` to itself in the table of page ids.
    """

    spec: Generate
    seed: int
    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    promised_pages: int = 0
    row: int = -1
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, spec: Generate, seed: int) -> Request:
        """A request of which nothing is computed yet; `seed` is used for sampling if the caller gave none."""
        own = spec.sampling.seed
        return cls(spec, seed if own is None else own, list(spec.prompt))

    @property
    def id(self) -> str:
        """The caller's id."""
        return self.spec.request_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.spec.prompt)

    @property
    def generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def wanted(self) -> int:
        """Tokens that are known but not computed."""
        return len(self.tokens) - self.computed

    @property
    def max_length(self) -> int:
        """Tokens that may ever need a place in the pages: the last one drawn is never computed."""
        return self.prompt_tokens + self.spec.max_tokens - 1

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be one that ends the request."""
        return self.generated >= self.spec.min_tokens

    def append(self, token: int) -> None:
        """Add a drawn token, and finish if it is the last one."""
        assert self.finish_reason is None, self.id
        assert self.wanted == 0, self.id
        may_stop = self.may_stop
        self.tokens.append(token)
        if may_stop and token in self.spec.stop_token_ids:
            self.finish_reason = "stop"
        elif self.generated >= self.spec.max_tokens:
            self.finish_reason = "length"
