"""The lines of the log, of every process of a server: as text for people, or as JSON for what collects logs."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Literal

import orjson

LogFormat = Literal["text", "json"]

_log = logging.getLogger(__name__)

_TEXT = "%(asctime)s %(levelname)-7s {name}: %(message)s"
_LIBRARIES = ("uvicorn", "asyncio", "httpcore2", "httpx2", "huggingface_hub", "filelock")


class JsonLines(logging.Formatter):
    """A record as one line of JSON: `time` (UTC, RFC 3339), `level`, `logger`, `message`, and `process` if it is not
    the server's first. The line of a request has its fields under `request`; that of an error its traceback under
    `exception`.
    """

    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process is not None:
            line["process"] = self._process
        if (request := getattr(record, "request", None)) is not None:
            line["request"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # A text of a caller or of a file name may have surrogates, which UTF-8 has not.
        return orjson.dumps(_clean(line)).decode()


def formatter(form: LogFormat, process: str | None = None) -> logging.Formatter:
    """What makes the lines of one process; `process` names one that is not the server's first: `engine`, `rank 1`."""
    if form == "json":
        return JsonLines(process)
    return logging.Formatter(_TEXT.format(name=process or "%(name)s"))


def configure_logging(level: str, form: LogFormat = "text", process: str | None = None) -> None:
    """Log to stderr from `level` on; libraries speak from warnings on.

    In JSON Python's own warnings and what nobody has caught are lines of the log, too: a traceback has many lines, none
    of which is an object.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form, process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(form == "json")
    if form == "json":
        sys.excepthook = _uncaught
        threading.excepthook = _uncaught_in_thread
        sys.unraisablehook = _unraisable
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return  # somebody wanted it so
    _log.critical("%s", kind.__name__, exc_info=(kind, error, traceback))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    name = "" if args.thread is None else args.thread.name
    _log.error("thread %s: %s", name, args.exc_type.__name__, exc_info=args.exc_value)


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    _log.error("%s: %r", args.err_msg or "an exception was ignored in", args.object, exc_info=args.exc_value)


def _clean(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _clean(part) for key, part in value.items()}
    return value
