"""A policy that is one class and its mask is read, sent, foreseen, computed and told like those that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from longreach.engine.engine import Engine
from longreach.engine.messages import LENGTH_BYTES, encode_frame
from longreach.policies import schemas
from longreach.policies.masks import mask_of
from longreach.policies.parse import policy_of
from longreach.policies.values import Dense, RequestPolicy, Tokens
from longreach.policies.visible import Visible
from longreach_kernels import Mask
from longreach_kernels.masks import block_rules, mask
from msgspec import Meta

from tests.server.engine.conftest import save_model
from tests.server.engine.driving import drain
from tests.server.engine.test_policies import build, eager_tokens, spec


class Dotted(RequestPolicy, frozen=True, tag="dotted"):
    """Of the last keys, those in every other block."""

    size: Annotated[Tokens, Meta(description="Keys back to which a query sees.")] = 512

    def visible(self) -> Visible:
        return Visible(self.size / 2, 0.0)


@mask_of.register
def _(policy: Dotted) -> Mask:
    return mask.Window(policy.size) & block_rules.Strided(2)


@pytest.fixture
def dotted(monkeypatch: pytest.MonkeyPatch) -> Dotted:
    monkeypatch.setitem(schemas.BY_NAME, "dotted", schemas.schema_of(Dotted))
    policy = policy_of("dotted:300").resolve()
    assert isinstance(policy, Dotted)
    return policy


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return build(save_model(tmp_path, max_position_embeddings=2048, sliding_window=200))


def test_its_parameters_are_checked_and_described_as_the_class_says(dotted: Dotted) -> None:
    assert dotted == Dotted(size=300)
    with pytest.raises(ValueError, match="must be from 1 to 16777216, got 0"):
        policy_of({"policy": "dotted", "size": 0})
    described = schemas.BY_NAME["dotted"].model_json_schema()
    assert described["description"] == "Of the last keys, those in every other block."
    assert described["properties"]["size"] == {
        "default": 512,
        "description": "Keys back to which a query sees.",
        "maximum": 2**24,
        "minimum": 1,
        "title": "Size",
        "type": "integer",
    }


def test_it_travels_in_a_request(dotted: Dotted) -> None:
    sent = msgspec.msgpack.decode(encode_frame(spec("a", dotted))[LENGTH_BYTES:])
    assert msgspec.convert(sent["attention"], Dense | Dotted) == dotted


def test_its_requests_are_computed_foreseen_and_told(engine: Engine, tmp_path: Path, dotted: Dotted) -> None:
    one = spec("a", dotted)
    assert engine.submit(one) is None
    [request] = engine.scheduler.waiting.values()
    assert request.visible == Visible(150, 0.0)
    tokens, updates, failures = drain(engine)
    assert not failures
    assert tokens["a"] == eager_tokens(tmp_path, one)
    [use] = [update.attention for update in updates["a"] if update.attention is not None]
    assert (use.policy.name, use.policy.parameters) == ("dotted", {"size": 300})
    assert use.pairs < use.dense_pairs
