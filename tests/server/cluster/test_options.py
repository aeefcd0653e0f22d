"""The size of a deployment: flags that exclude each other, GPUs of a replica, settings of no use, and scaling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from longreach.cluster.autoscaling import UnreadTokens
from longreach.cluster.replica_options import bounds, parse_tokens, refuse_unused, replica_gpus
from longreach.config import Settings, load_settings
from longreach.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((None, None, None), (1, 1)),
        ((3, None, None), (3, 3)),
        ((None, 2, 5), (2, 5)),
        ((None, None, 4), (1, 4)),
        ((None, 2, None), (2, 2)),
    ],
)
def test_bounds(flags: tuple[int | None, ...], expected: tuple[int, int]) -> None:
    assert bounds(*flags) == expected


@pytest.mark.parametrize("flags", [(2, 1, None), (2, None, 3), (0, None, None), (65, None, None), (None, 3, 2)])
def test_bounds_that_cannot_be_name_their_flags(flags: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigError, match=r"--(replicas|min-replicas)"):
        bounds(*flags)


@pytest.mark.parametrize(("device", "cluster", "gpus"), [("cpu", 8, 0), ("auto", 0, 0), ("auto", 8, 1), ("cuda", 0, 1)])
def test_a_replica_takes_a_gpu_where_there_are_any(device: str, cluster: float, gpus: int) -> None:
    assert replica_gpus(load_settings(device=device), cluster) == gpus


def test_a_replica_takes_a_gpu_for_each_rank() -> None:
    ranks = SimpleNamespace(device="auto", tensor_parallel_size=2, context_parallel_size=4)
    assert replica_gpus(cast("Settings", ranks), 8) == 8


def test_the_number_of_a_gpu_is_rays_to_give() -> None:
    with pytest.raises(ConfigError, match="--device"):
        replica_gpus(load_settings(device="cuda:1"), 8)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("header_timeout", 3.0),
        ("write_timeout", 5.0),
        ("max_header_bytes", 2048),
        ("port", 0),
        ("responses_store", "responses.db"),
        ("documents", "documents.db"),
    ],
)
def test_settings_without_an_effect_are_refused(setting: str, value: Any) -> None:
    refuse_unused(load_settings())
    refuse_unused(load_settings(responses_store="none", documents="none"))
    with pytest.raises(ConfigError, match="--" + setting.replace("_", "-")):
        refuse_unused(load_settings(**{setting: value}))


def test_tokens_are_read_as_everywhere() -> None:
    assert parse_tokens("128k", "--target-queued-tokens") == 131072
    for wrong in ("many", "0"):
        with pytest.raises(ConfigError, match="--target-queued-tokens"):
            parse_tokens(wrong, "--target-queued-tokens")


@pytest.mark.parametrize(
    ("unread", "requests", "wanted"), [(0, 0, 1), (1000, 1, 1), (1001, 1, 2), (5500, 3, 6), (0, 64, 1), (0, 65, 2)]
)
def test_a_replica_for_each_so_many_unread_tokens_and_for_open_requests(
    unread: float, requests: float, wanted: int
) -> None:
    policy = UnreadTokens(target_tokens=1000, max_num_seqs=64)
    halves: Any = {"unread_tokens": {"a": unread / 2, "b": unread / 2}}
    assert policy(cast("Any", SimpleNamespace(aggregated_metrics=halves, total_num_requests=requests))) == (wanted, {})
