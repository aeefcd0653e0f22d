"""Output that never waits for its reader: what reads the log may stand still, and costs lines of it, never answers.

A write to a pipe whose reader has stopped blocks for ever, and with it the event loop or the engine that wrote a line.
Here stdout and stderr of the process, and so of the children that inherit them, lead into pipes of its own. One thread
empties such a pipe at once, another writes to where the output went before, and may be blocked there. What exceeds the
buffer between them is dropped by the line, and counted; the number is told when the reader reads again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator

from longreach.util.log_lines import LogFormat, formatter

# Kept for a reader that is slow: the lines of twenty thousand requests.
_BUFFER_BYTES = 4 << 20
_CHUNK_BYTES = 64 << 10
# What was said last may take so long to be written at the end of the process.
_LAST_WORDS_SECONDS = 1.0


@contextlib.contextmanager
def unblocked_output(
    form: LogFormat = "text", buffer_bytes: int = _BUFFER_BYTES, last_words: float = _LAST_WORDS_SECONDS
) -> Iterator[None]:
    """Lead this process's stdout and stderr through pipes for as long as the context lasts; its own
    lines have `form`.

    At its end what is in them is written, for at most `last_words` seconds each. If that was not enough, nobody reads,
    and whatever is said later goes nowhere, since it would block the end of the process.
    """
    faults = faulthandler.is_enabled()
    with contextlib.ExitStack() as pipes:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and (number := _descriptor(stream)) in (1, 2):
                pipe = OutputPipe(number, buffer_bytes, form)
                pipes.callback(pipe.close, last_words)
                pipes.callback(stream.flush)
                if number == 2 and faults:  # it speaks when no thread runs any more
                    faulthandler.enable(pipe.destination)
                    pipes.callback(faulthandler.enable, 2)
        yield


def _descriptor(stream: object) -> int:
    try:
        return stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # replaced by something that is no file
        return -1


class OutputPipe:
    """Stands in for the file descriptor `number`; `destination` is a duplicate of what it was."""

    def __init__(self, number: int, buffer_bytes: int = _BUFFER_BYTES, form: LogFormat = "text") -> None:
        self._number = number
        self._form: LogFormat = form
        self._buffer_bytes = buffer_bytes
        self._chunks: deque[bytes] = deque()
        self._size = 0  # bytes that are not written yet
        self._dropped = 0  # lines, since the last that was kept
        # Whether what was kept, or dropped, last has no end of line yet.
        self._keeping_line = self._losing_line = False
        self._ended = False
        self._changed = threading.Condition()
        self.destination = os.dup(number)
        self._source, into = os.pipe()
        self._wake, self._waker = os.pipe()
        os.dup2(into, number)  # inheritable, as it was
        os.close(into)
        os.set_blocking(self._source, False)
        self._reader = threading.Thread(target=self._read, name=f"output-{number}-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"output-{number}-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def close(self, seconds: float = _LAST_WORDS_SECONDS) -> bool:
        """Write what is there, for at most `seconds`, and give the descriptor back; whether all was written."""
        os.write(self._waker, b"x")
        self._reader.join()
        self._writer.join(seconds)
        written = not self._writer.is_alive()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(self.destination if written else nowhere, self._number)
        for descriptor in (nowhere, self._source, self._wake, self._waker, *([self.destination] if written else [])):
            os.close(descriptor)
        return written

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        ended = False
        while not ended:
            ended = any(number == self._wake for number, _ in poll.poll())
            with contextlib.suppress(BlockingIOError):  # the pipe is empty
                while data := os.read(self._source, _CHUNK_BYTES):
                    self._take(data)
                poll.unregister(self._source)  # somebody has closed the last descriptor that writes
                poll.poll()
                ended = True
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _take(self, data: bytes) -> None:
        """Keep what has come, or as many of its lines as there is room for."""
        with self._changed:
            if self._losing_line:  # its beginning is lost, and it is counted
                _, end, data = data.partition(b"\n")
                self._losing_line = not end
            room = 0 if self._dropped else max(0, self._buffer_bytes - self._size)
            if len(data) > room:
                end = data.rfind(b"\n", 0, room) + 1
                if self._keeping_line and not end and not self._dropped:
                    end = data.find(b"\n") + 1  # no line is kept by half for want of so little
                data, lost = data[:end], data[end:]
                if lost:
                    self._losing_line = not lost.endswith(b"\n")
                    self._dropped += lost.count(b"\n") + self._losing_line
            if data:
                self._chunks.append(data)
                self._size += len(data)
                self._keeping_line = not data.endswith(b"\n")
            self._changed.notify()

    def _write(self) -> None:
        ends_line = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks or self._dropped or self._ended)
                if self._chunks:
                    data = self._chunks[0]  # it takes room until it is written
                elif self._dropped:  # everything before is written: the reader reads again
                    data = (b"" if ends_line else b"\n") + _told(self._dropped, self._form)
                    self._dropped = 0
                else:
                    return
            with contextlib.suppress(OSError):  # the reader is gone, or a disk is full: nobody is left to tell
                _write_all(self.destination, data)
            ends_line = data.endswith(b"\n")
            with self._changed:
                if self._chunks and self._chunks[0] is data:
                    self._size -= len(self._chunks.popleft())


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # others who share the file have made it so
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


def _told(lines: int, form: LogFormat) -> bytes:
    """The line of the log that stands for others."""
    record = logging.makeLogRecord(
        {
            "name": __name__,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": "lines that were dropped here, since nobody read the log: %d",
            "args": (lines,),
        }
    )
    return (formatter(form).format(record) + "\n").encode()
