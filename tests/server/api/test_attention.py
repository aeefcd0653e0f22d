"""`attention` in a request: what is refused and how, what reaches the engine; and the policies' list and pictures."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import struct
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from longreach import sizes
from longreach.api.service import mask_pictures
from longreach.api.service.mask_pictures import MaskPictures
from longreach.config import load_settings
from longreach.engine.messages import LENGTH_BYTES, Generate, encode_frame, to_engine_decoder
from longreach.errors import ConfigError, OverloadedError
from longreach.policies.masks import mask_of
from longreach.policies.parse import policy_of
from longreach.policies.schemas import SCHEMAS, PolicySchema
from longreach.policies.values import (
    DENSE,
    AttentionPolicy,
    Dynamic,
    LocalGlobal,
    SparseDecode,
    StepPolicy,
    Strided,
    VerticalSlash,
    Window,
)
from longreach_kernels import sizes as kernel_sizes
from longreach_kernels.analysis.work import work
from longreach_kernels.sparse.select.select_tiles import DENSE_BELOW

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.picture_stubs import drawn_at_once, killed_at_work

WINDOW = Window(size=100, sinks=2)


@pytest.mark.parametrize("asked", ["window:100:2", {"policy": "window", "size": 100, "sinks": 2}])
def test_a_policy_reaches_the_engine_from_every_endpoint(server: LiveServer, asked: object) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "attention": asked}
    reply = {"model": MODEL, "input": "Hello", "max_output_tokens": 3, "attention": asked}
    assert server.complete(attention=asked, n=2).status_code == 200
    assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
    assert server.http.post("/v1/responses", json=reply).status_code == 200
    assert [request.attention for request in server.engine.requests] == [WINDOW] * 4


def test_sizes_of_block_patterns_take_effect_in_whole_blocks(server: LiveServer) -> None:
    server.complete(attention={"policy": "local_global", "window": 129, "global_tokens": 0})
    server.complete(attention={"policy": "vertical_slash", "verticals": [9, 3, 9], "slashes": []})
    assert [request.attention for request in server.engine.requests] == [
        LocalGlobal(window=256, global_tokens=0),
        VerticalSlash(verticals=(3, 9), slashes=()),
    ]


def test_a_dynamic_policy_has_one_target_and_a_default(server: LiveServer) -> None:
    for asked in ("dynamic", "dynamic:0.9", {"policy": "dynamic", "density": 0.3, "estimator": "pooled"}):
        assert server.complete(attention=asked).status_code == 200
    assert [request.attention.parameters for request in server.engine.requests] == [
        {"recall": 0.95, "estimator": "auto", "dense_below": 8192},
        {"recall": 0.9, "estimator": "auto", "dense_below": 8192},
        {"density": 0.3, "estimator": "pooled", "dense_below": 8192},
    ]


def test_the_server_s_default_is_for_requests_that_name_none(make_server: Callable[..., LiveServer]) -> None:
    with make_server(attention="window:100:2") as server:
        for asked in (None, "dense", {"policy": "dense"}, "strided:128"):
            server.complete(attention=asked)
        server.complete()
        strided = Strided(stride=128, per_head=False)
        assert [request.attention for request in server.engine.requests] == [WINDOW, DENSE, DENSE, strided, WINDOW]
        assert server.http.get("/v1/attention/policies").json()["default"] == "window:100:2"


NAMES = "dense, window, a_shape, strided, local_global, bigbird, vertical_slash, dynamic"


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"policy": "window", "size": 0}, "attention.size", "must be from 1 to 16777216, got 0"),
        ({"policy": "window", "size": 2**24 + 1}, "attention.size", "must be from 1 to 16777216, got 16777217"),
        ({"policy": "window", "sinks": -1}, "attention.sinks", "must be from 0 to 16777216, got -1"),
        ({"policy": "window", "size": True}, "attention.size", "must be a valid integer"),
        ({"policy": "window", "size": "7"}, "attention.size", "must be a valid integer"),
        ({"policy": "window", "stride": 7}, "attention.stride", "Unrecognized request argument"),
        ({"policy": "bigbird", "random_blocks": 65}, "attention.random_blocks", "must be from 0 to 64, got 65"),
        ({"policy": "strided", "per_head": 1}, "attention.per_head", "must be a valid boolean"),
        ({"policy": "vertical_slash", "slashes": [1, -1]}, "attention.slashes.1", "must be from 0 to 16777216"),
        ({"policy": "vertical_slash", "verticals": [0] * 257}, "attention.verticals", "at most 256 items"),
        ({"policy": "dynamic", "recall": 1.5}, "attention.recall", "must be from 0.01 to 1, got 1.5"),
        ({"policy": "dynamic", "speedup": 0.5}, "attention.speedup", "must be from 1 to 16, got 0.5"),
        (
            {"policy": "dynamic", "recall": 0.9, "density": 0.5},
            "attention",
            "`recall` and `density` cannot both be set",
        ),
        ({"policy": "dynamic", "decode_budget": 31}, "attention.decode_budget", "must be from 32 to 16777216, got 31"),
        ({"policy": "dynamic", "decode_budget": 64.5}, "attention.decode_budget", "must be a valid integer"),
        ("dynamic:0.9:16", "attention.decode_budget", "must be from 32 to 16777216, got 16"),
        ("dynamic:0.9:64", "attention.decode_budget", "needs bounds of the keys; start the server with --page-bounds"),
        (
            {"policy": "dynamic", "estimator": "guess"},
            "attention.estimator",
            "'auto', 'antidiagonal', 'moments' or 'pooled'",
        ),
        ({"policy": "no"}, "attention.policy", f"must be one of {NAMES}"),
        ({}, "attention.policy", f"must be one of {NAMES}"),
        ("no", "attention.policy", f"must be one of {NAMES}"),
        ("window:0", "attention.size", "must be from 1 to 16777216, got 0"),
        ("window:1:2:3", "attention", "`window` has 2 parameters: window:SIZE:SINKS"),
        ("window 4", "attention", "a text such as window:4096:4"),
        (7, "attention", "must be an object with a `policy`"),
        ([], "attention", "must be an object with a `policy`"),
    ],
)
def test_what_cannot_be_is_refused_by_field_and_range(
    server: LiveServer, asked: object, param: str, message: str
) -> None:
    answer = server.complete(attention=asked)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert f"`{param}`" in error["message"] or "Unrecognized" in message
    assert not server.engine.requests


def test_a_default_that_cannot_be_is_refused_by_the_flag() -> None:
    for value, message in (
        ("window:0", "--attention: `size` must be from 1 to 16777216"),
        ('{"policy": "window", ', "--attention: not valid JSON"),
        ("sometimes", f"--attention: `policy` must be one of {NAMES}"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_settings(attention=value)
    with pytest.raises(ConfigError, match=r"--attention: a decode budget needs .* with --page-bounds"):
        load_settings(attention="dynamic:0.9:512")
    budgeted = load_settings(attention="dynamic:0.9:520", page_bounds=True)
    assert budgeted.default_policy.answer_budget == 512
    assert budgeted.engine_config().page_bounds
    with pytest.raises(ConfigError, match="--attention-dense-layers: give numbers of layers"):
        load_settings(attention_dense_layers="first")
    config = load_settings(attention='{"policy": "window", "size": 100, "sinks": 2}', attention_dense_layers="0, -1")
    assert config.default_policy == WINDOW
    assert config.engine_config().attention_dense_layers == [0, -1]


def test_the_policies_are_listed_with_bounds_and_defaults_that_hold(server: LiveServer) -> None:
    server.engine.info = msgspec.structs.replace(server.engine.info, page_bounds=True)
    listed = server.http.get("/v1/attention/policies").json()
    assert listed["object"] == "list"
    assert ", ".join(one["policy"] for one in listed["data"]) == NAMES
    for one in listed["data"]:
        defaults = {name: parameter["default"] for name, parameter in one["parameters"].items()}
        assert server.complete(attention={"policy": one["policy"], **defaults}).status_code == 200
        for name, parameter in one["parameters"].items():
            assert parameter["description"]
            for bound, step in (("minimum", -1), ("maximum", 1)):
                if bound not in parameter:
                    assert parameter["type"] == "boolean" or parameter["values"] == [
                        "auto",
                        "antidiagonal",
                        "moments",
                        "pooled",
                    ]
                    continue
                wrap: Callable[[Any], Any] = (lambda x: [x]) if parameter["type"].startswith("list") else (lambda x: x)
                at, beyond = wrap(parameter[bound]), wrap(parameter[bound] + step)
                assert server.complete(attention={"policy": one["policy"], name: at}).status_code == 200
                assert server.complete(attention={"policy": one["policy"], name: beyond}).status_code == 400


def test_a_mask_for_which_no_process_can_be_started_is_refused(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptors(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for place in (
        "longreach.api.service.mask_pictures.require_descriptors",
        "concurrent.futures.ProcessPoolExecutor.submit",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, no_descriptors)
            answer = mask(server, policy="window", size=100, length=640)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "drawing_failed")
        assert int(answer.headers["retry-after"]) > 0


def mask(server: LiveServer, **query: object) -> Any:
    return server.http.get("/v1/attention/mask", params=query)  # type: ignore[arg-type]


def test_a_picture_tells_what_the_kernels_would_visit(server: LiveServer) -> None:
    told = mask(server, policy="strided", stride=512, length=5000).json()
    drawn = mask_of(Strided(stride=512))
    tiles = {"tile_q": 128, "tile_k": 128}
    exact = work(drawn, 5000, 5000, 64, **tiles)
    causal = work(mask_of(DENSE), 5000, 5000, 64, **tiles)
    assert (told["policy"], told["parameters"], told["length"]) == ("strided", {"stride": 512, "per_head": False}, 5000)
    assert (told["tiles_visited"], told["tiles_total"], told["block"]) == (exact.tiles, causal.tiles, 128)
    assert told["density"] == pytest.approx(exact.pairs / causal.pairs)
    assert told["flops_saved_share"] == pytest.approx(1 - exact.tiles / causal.tiles)
    assert told["exact"] is True
    grid = torch.tensor(told["grid"])
    assert grid.shape == (128, 128)
    assert not grid.triu(1).any()
    assert abs(grid.float().mean() / 100 - exact.pairs / 5000**2) < 0.01


def test_short_prompts_and_dense_attention_have_pictures_too(server: LiveServer) -> None:
    told = mask(server, policy="dense", length=3).json()
    assert told["grid"] == [[100, 0, 0], [100, 100, 0], [100, 100, 100]]
    assert (told["density"], told["flops_saved_share"]) == (1.0, 0.0)


def test_a_picture_can_be_a_png(server: LiveServer) -> None:
    by_name = mask(server, policy="window", size=100, length=640, format="png")
    by_header = server.http.get(
        "/v1/attention/mask?policy=window&size=100&length=640", headers={"Accept": "image/png,*/*"}
    )
    assert by_name.headers["content-type"] == by_header.headers["content-type"] == "image/png"
    assert by_name.content == by_header.content
    assert by_name.content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", by_name.content[16:24]) == (128, 128)
    start = by_name.content.index(b"IDAT") + 4
    pixels = zlib.decompressobj().decompress(by_name.content[start:])
    assert len(pixels) == 128 * 129
    assert pixels[1] < 255  # the first query sees itself
    assert pixels[128] == 255  # and not the last key


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ({"policy": "window", "size": 0}, "size", "must be from 1 to 16777216, got 0"),
        ({"policy": "window", "size": "x"}, "size", "must be a valid integer"),
        ({"policy": "window", "stride": 5}, "stride", "Unrecognized"),
        ({"policy": "none"}, "policy", "must be one of"),
        ({"policy": "dynamic"}, "policy", "dynamic chooses by the prompt"),
        ({}, "policy", "is required"),
        ({"policy": "dense", "length": 0}, "length", "must be an integer from 1 to 4194304, got '0'"),
        ({"policy": "dense", "length": "١"}, "length", "must be an integer from 1"),
        ({"policy": "dense", "length": 2**22 + 1}, "length", "must be an integer from 1 to 4194304"),
        ({"policy": "dense", "format": "gif"}, "format", "must be json or png"),
        ({"policy": ["dense", "window"]}, "policy", "is given twice"),
    ],
)
def test_a_picture_that_cannot_be_is_refused(
    server: LiveServer, query: dict[str, object], param: str, message: str
) -> None:
    answer = mask(server, **query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_a_picture_of_the_longest_prompt_is_a_sample_and_holds_nobody_up(server: LiveServer) -> None:
    mask(server, policy="dense", length=3)  # the process is there
    gaps, last = [], time.monotonic()
    done = False

    def watch() -> None:
        nonlocal last
        now = time.monotonic()
        gaps.append(now - last)
        last = now
        if not done:
            server.loop.call_later(0.01, watch)

    server.call(watch)
    told = mask(server, policy="bigbird", length=2**22).json()
    done = True
    assert told["exact"] is False
    assert 0 < told["density"] < 0.01
    assert len(gaps) > 5, "the loop did not turn while the mask was drawn"


def test_a_picture_is_drawn_though_the_process_for_it_was_killed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_pictures, "picture", drawn_at_once)
    first = mask(server, policy="dense", length=3).json()
    [killed] = [process for process in multiprocessing.active_children() if process.pid == first["density"]]
    killed.kill()
    killed.join(10)
    assert mask(server, policy="dense", length=4).json()["density"] not in (os.getpid(), first["density"])
    assert mask(server, policy="dense", length=3).json() == first


def test_a_picture_that_ends_its_process_twice_is_refused_and_the_next_is_drawn(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mask_pictures, "picture", killed_at_work)
    answer = mask(server, policy="window", size=100, length=300)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (503, "drawing_failed", "service_unavailable")
    assert answer.headers["x-should-retry"] == "false"
    told = [record for record in caplog.records if "masks ended; it was to draw window of 300" in record.getMessage()]
    assert len(told) == 2
    assert not any(record.exc_info for record in caplog.records)
    monkeypatch.setattr(mask_pictures, "picture", drawn_at_once)
    assert mask(server, policy="window", size=100, length=300).status_code == 200


def test_a_picture_without_a_process_is_refused_and_the_next_is_drawn(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mask_pictures, "picture", drawn_at_once)
    before = set(multiprocessing.active_children())
    for error in (OSError(24, "Too many open files"), RuntimeError("can't start new thread")):

        def refuse(*_: object, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patched:  # behind the start of the pool's process
            patched.setattr(ProcessPoolExecutor, "_start_executor_manager_thread", refuse)
            answer = mask(server, policy="dense", length=3)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "drawing_failed")
        assert answer.headers["retry-after"] == "2"
        assert str(error) in caplog.text
    assert not any(record.exc_info for record in caplog.records)
    eventually(lambda: not set(multiprocessing.active_children()) - before)
    assert mask(server, policy="dense", length=3).status_code == 200


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_policy_travels_to_the_engine_and_stays_itself(schema: type[PolicySchema]) -> None:
    policy = policy_of(schema.name()).resolve()
    sent = Generate(request_id="a", prompt=[1], max_tokens=1, attention=policy)
    assert to_engine_decoder.decode(encode_frame(sent)[LENGTH_BYTES:]) == sent
    assert policy.is_dynamic or mask_of(policy).heads >= 1


def test_sizes_are_those_of_the_kernels() -> None:
    assert (sizes.TILE, sizes.KEY_BLOCK) == (kernel_sizes.TILE, kernel_sizes.KEY_BLOCK)
    assert Dynamic().dense_below == DENSE_BELOW


def test_an_a_shape_is_a_window_with_its_own_defaults(server: LiveServer) -> None:
    server.complete(attention="a_shape")
    server.complete(attention={"policy": "a_shape", "sinks": 7, "window": 300})
    assert [request.attention for request in server.engine.requests] == [
        Window(size=8192, sinks=1024),
        Window(size=300, sinks=7),
    ]


def test_no_request_can_name_what_the_tokens_of_a_sparse_answer_are_computed_under() -> None:
    sent = msgspec.msgpack.encode(SparseDecode(64))
    with pytest.raises(msgspec.ValidationError, match="sparse_decode"):
        msgspec.msgpack.decode(sent, type=AttentionPolicy)
    assert msgspec.msgpack.decode(sent, type=StepPolicy) == SparseDecode(64)


def test_masks_are_drawn_for_callers_in_turn_and_not_for_those_who_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    async def main() -> None:
        masks, gate = MaskPictures(), asyncio.Event()

        async def run(policy: AttentionPolicy, length: int) -> str:
            await gate.wait()
            drawn.append(length)
            return f"picture {length}"

        monkeypatch.setattr(masks, "_run", run)
        alice = []
        for length in range(1, mask_pictures._MOST_OF_ONE + 2):  # one of them has begun
            alice.append(asyncio.create_task(masks.draw(DENSE, length, "alice")))
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as refused:
            await masks.draw(DENSE, 100, "alice")
        assert refused.value.code == "busy_drawing"
        bob = asyncio.create_task(masks.draw(DENSE, 200, "bob"))
        await asyncio.sleep(0)
        for task in alice[3:]:
            task.cancel()
        await asyncio.wait(alice[3:])
        gate.set()
        assert await bob == "picture 200"
        assert [await task for task in alice[:3]] == [f"picture {length}" for length in (1, 2, 3)]
        assert await masks.draw(DENSE, 2, "carol") == "picture 2"

    asyncio.run(asyncio.wait_for(main(), 10))
    assert drawn == [1, 200, 2, 3]
