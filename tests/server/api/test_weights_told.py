"""What the server tells of its weights: the formats of quantised ones, and the bytes that they take."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tests.server.api.conftest import LiveServer


@pytest.mark.parametrize("quantization", ["fp8 by channel", ""])
def test_models_and_metrics_name_the_formats_and_count_their_bytes(
    make_server: Callable[..., LiveServer], quantization: str
) -> None:
    with make_server() as live:
        live.engine.info = msgspec.structs.replace(live.engine.info, quantization=quantization, weight_bytes=12345)
        [model] = live.http.get("/v1/models").json()["data"]
        assert (model["quantization"], model["weight_bytes"]) == (quantization or None, 12345)
        [line] = [
            line
            for line in live.http.get("/metrics").text.splitlines()
            if line.startswith("longreach:model_weights_info")
        ]
    assert 'bytes="12345"' in line
    assert f'quantization="{quantization or "none"}"' in line
