"""What is said reaches its reader in order, and a reader that stands still costs lines and nothing else."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest
from longreach.api.service.output_pipe import OutputPipe

ROOT = Path(__file__).parents[3]
DROPPED = re.compile(rb"WARNING longreach\.api\.service\.output_pipe: lines that were dropped here, .*: (\d+)\n")


class Pipe:
    """A descriptor to write to, and its reader, who reads when told to."""

    def __init__(self, buffer_bytes: int) -> None:
        self.reader, self.number = os.pipe()
        self.output = OutputPipe(self.number, buffer_bytes)

    def say(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.number, data) :]

    def read(self, until: bytes) -> bytes:
        """All that comes, up to and with a text."""
        said = b""
        while until not in said:
            assert select.select([self.reader], [], [], 10)[0], said[-200:]
            said += os.read(self.reader, 1 << 16)
        return said

    def rest(self) -> bytes:
        """All that comes until the descriptor is closed."""
        os.close(self.number)
        with open(self.reader, "rb") as stream:
            return stream.read()


@pytest.fixture
def pipe() -> Pipe:
    return Pipe(buffer_bytes=1 << 18)


def lines(numbers: range) -> bytes:
    return b"".join(b"line %06d\n" % number for number in numbers)


def test_all_lines_come_in_order_where_somebody_reads(pipe: Pipe) -> None:
    said = lines(range(15_000))
    writing = threading.Thread(target=pipe.say, args=(said,), daemon=True)
    got = b""
    with open(os.dup(pipe.reader), "rb", buffering=0) as stream:
        writing.start()
        while len(got) < len(said):
            got += stream.read(1 << 16) or b""
    writing.join()
    assert got == said
    pipe.say(b"last words without an end")
    assert pipe.output.close()
    assert pipe.rest() == b"last words without an end"


def test_a_reader_that_stands_still_blocks_nobody_and_is_told_what_it_missed(pipe: Pipe) -> None:
    said = lines(range(100_000))  # more than the kernel and the buffer keep
    pipe.say(said)  # it would block here for ever
    pipe.say(b"cut in")
    pipe.say(b" two\n")
    got = pipe.read(until=b"since nobody read the log")
    pipe.say(b"the end\n")  # there is room again
    got += pipe.read(until=b"the end\n") if b"the end\n" not in got else b""
    [count] = DROPPED.findall(got)
    kept, _, late = got.partition(DROPPED.search(got)[0])  # type: ignore[index]
    kept = kept[: kept.rfind(b"\n") + 1]  # without the time that the line of the log begins with
    assert said.startswith(kept), "what is kept is the beginning, by whole lines"
    # The last lines may have been on their way to the buffer when the reader began.
    assert (said + b"cut in two\nthe end\n").endswith(late)
    assert kept.count(b"\n") + int(count) + late.count(b"\n") == 100_002
    assert kept.count(b"\n") > 4000
    pipe.say(b"again\n")
    assert pipe.read(until=b"again\n") == b"again\n"
    assert pipe.output.close()
    assert pipe.rest() == b""


def test_the_end_does_not_wait_for_a_reader_that_stands_still(pipe: Pipe) -> None:
    pipe.say(lines(range(50_000)))
    assert not pipe.output.close(seconds=0.05)
    for _ in range(100):
        pipe.say(lines(range(1000)))  # goes nowhere: it would block
    os.close(pipe.number)


def test_a_reader_that_is_gone_blocks_nobody(pipe: Pipe) -> None:
    os.close(pipe.reader)
    pipe.say(lines(range(100_000)))
    assert pipe.output.close()
    os.close(pipe.number)


def test_a_server_whose_log_nobody_reads_answers_and_stops(model_dir: Path) -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "tests.server.api.serve_fake", str(model_dir), "0", "ok"]
    with subprocess.Popen(command, cwd=ROOT, stderr=writer, stdout=writer) as server:
        os.close(writer)
        said = b""
        while b"ready: " not in said:
            said += os.read(reader, 1 << 16)
        url = re.search(rb"ready: (http://\S+)", said)[1].decode()  # type: ignore[index]
        path = f"/{'x' * 250}"
        with httpx2.Client(base_url=url, timeout=10) as client:
            for _ in range(1000):  # a line of 300 bytes each
                assert client.get(path).status_code == 404
            assert client.get("/health").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    os.close(reader)
