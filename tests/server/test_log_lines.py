"""The log in JSON: one object a line, whatever is said, by every process of a server."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from longreach.api.http.request_log import RequestRecord
from longreach.api.service import output_pipe
from longreach.util.log_lines import JsonLines

from tests.server.load.process import ServerProcess, eventually

PROGRAM = r"""
import logging, threading, warnings
from longreach.util.log_lines import configure_logging
configure_logging("info", "json", "engine")
log = logging.getLogger("longreach.test")
log.info("of %s\nand \udc80 \x1b", "ä")
log.debug("not told")
try:
    raise ValueError("odd")
except ValueError:
    log.exception("failed")
warnings.warn("old")

class Odd:
    def __del__(self):
        raise KeyError("ignored")

Odd()
thread = threading.Thread(target=lambda: [][1], name="reader")
thread.start()
thread.join()
raise RuntimeError("nobody\ncatches it")
"""


def test_a_line_is_an_object_whatever_is_in_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    first, second, third, *uncaught = map(json.loads, done.stderr.splitlines())
    assert first["message"] == "of ä\nand \\udc80 \x1b"
    assert (first["level"], first["logger"], first["process"]) == ("info", "longreach.test", "engine")
    assert first["time"].endswith("Z")
    assert "exception" not in first
    assert second["exception"].endswith("ValueError: odd")
    assert third["logger"] == "py.warnings"
    assert "old" in third["message"]
    ends = [line["exception"].splitlines()[-1] for line in uncaught]
    assert ends == ["KeyError: 'ignored'", "IndexError: list index out of range", "catches it"]
    assert [line["level"] for line in uncaught] == ["error", "error", "critical"]
    assert uncaught[1]["message"] == "thread reader: IndexError"


def test_a_request_has_its_fields_by_name(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord("r1", "POST", "/v1/completions")
    record.answering("cmpl-1", 12)
    record.add_token()
    record.due(1500, 0.25)
    record.answered(200)
    record.finished("stop")
    with caplog.at_level(logging.INFO):
        record.log(logging.getLogger("longreach.requests"))
    line = json.loads(JsonLines().format(caplog.records[-1]))
    request = line["request"]
    begin = "id=r1 POST /v1/completions status=200 completion=cmpl-1 prompt=12 cached=0 output=1 "
    times = f"ttft={request['ttft']:.3f}s deadline=1.500s predicted=0.250s total={request['total']:.3f}s"
    assert line["message"] == f"{begin}{times} finish=stop"
    assert (request["prompt"], request["deadline"], request["predicted"]) == (12, 1.5, 0.25)
    assert "process" not in line


def test_the_line_of_lost_lines_is_one_too() -> None:
    told = json.loads(output_pipe._told(7, "json"))
    assert told["message"].endswith(": 7")
    assert told["level"] == "warning"


def test_every_process_of_a_server_writes_json() -> None:
    with ServerProcess("--log-format", "json", "--max-model-len", "2k", "--kv-cache-memory", "32MiB") as process:
        eventually(lambda: "ready: http" in process.log or process.process.poll() is not None, 120, "ready")
    said = [json.loads(line) for line in process.lines]
    assert {line.get("process") for line in said} == {"engine", None}, process.log
