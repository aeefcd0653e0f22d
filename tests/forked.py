"""Processes of our own modules that tests start are forked from the worker, which has imported torch and transformers.

An import of both takes four seconds of a processor, and the tests start some two hundred engines, ranks and servers.
Between fork and `main` a child is made what `python -m MODULE` would be: descriptors, signals, environment, streams.
Files that ask how processes start, and what runs alone, get real ones: see `REAL`.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import gc
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.distributed import distributed_c10d

# Tests of these start real processes, as tests that run alone do.
REAL = (
    "tests/server/cluster/test_deploy.py",
    "tests/server/engine/test_parallel_compile.py",
    "tests/server/engine/test_process_start.py",
    "tests/server/test_bare_start.py",
    "tests/server/test_cli.py",
    "tests/server/test_safe_path.py",
    "tests/test_forked.py",
    "tests/test_main_job.py",
)
_MODULES = (
    "longreach",
    "longreach.engine.startup.engine_process",
    "longreach.engine.startup.rank_process",
    "benchmarks.compare",
    "benchmarks.compare.transformers_peer",
    "benchmarks.methods",
    "benchmarks.quality",
    "tests.kernels.context_ranks",
)
_EXECUTE = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]
_KEPT: list[object] = []
_TORCH_SEED = 67280421310721  # torch's own, of a process that has set none


@contextmanager
def forking() -> Iterator[None]:
    """Fork instead of executing Python, wherever a process of `_MODULES` is started.

    Where there is a GPU, or torch has threads, nothing is forked: neither survives that.
    """
    if torch.cuda.is_available() or torch.get_num_threads() > 1:
        yield
        return
    with patch.object(subprocess.Popen, "_execute_child", _execute):
        yield


# The arguments are those of CPython's own method; only what `_wanted` lets through is forked.
def _execute(popen: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, *more: Any) -> None:
    (pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest) = more
    session = rest[-2]
    if shell or preexec_fn is not None or not close_fds or not _wanted(args):
        _EXECUTE(popen, args, executable, preexec_fn, close_fds, *more)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads: what they hold, `_become` replaces
        pid = os.fork()
    if pid == 0:
        _become(
            args, (p2cread, c2pwrite, errwrite), set(pass_fds), cwd, os.environ.copy() if env is None else env, session
        )
    popen.pid = pid
    popen._child_created = True
    popen._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _wanted(args: Any) -> bool:
    if isinstance(args, (str, bytes)) or args[0] != sys.executable:
        return False
    flags, rest = _split(args)
    return flags in ([], ["-P"]) and bool(rest) and rest[0] in _MODULES


def _split(args: Any) -> tuple[list[str], list[str]]:
    """Python's flags, and the module with its arguments; nothing of the latter where no module is run."""
    words = [*map(str, args[1:])]
    if "-m" not in words:
        return words, []
    at = words.index("-m")
    return words[:at], words[at + 1 :]


def _become(args: Any, streams: tuple[int, int, int], keep: set[int], cwd: Any, env: Any, session: bool) -> NoReturn:
    """Turn this fork into the process that `args` would have made, and never return."""
    status = 1
    gc.freeze()  # the parent's objects are never collected: some wait for threads that are not here
    try:
        if session:
            os.setsid()
        _take_descriptors(streams, keep)
        _forget()
        if cwd is not None:
            os.chdir(cwd)
        os.environ.clear()
        os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
        flags, (module, *arguments) = _split(args)
        named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:] = [*named, *(entry for entry in sys.path if entry and entry not in named)]
        if "-P" not in flags and not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, os.getcwd())
        sys.argv = [module, *arguments]
        status = _run(module)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc(file=sys.__stderr__)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _run(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    return status


def _take_descriptors(streams: tuple[int, int, int], keep: set[int]) -> None:
    """Give the child its streams; what else was open is /dev/null.

    A descriptor that was closed would be given out again, and an object of the parent's that is collected closes it.
    """
    for wanted, given in enumerate(streams):
        if given >= 0:
            os.dup2(given, wanted)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != null and descriptor not in keep:
            try:
                os.dup2(null, descriptor, inheritable=False)
            except OSError:
                continue  # that of the listing itself
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), errors="backslashreplace", line_buffering=True
    )


def _forget() -> None:
    """Undo what the worker and its tests have set in this process."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    atexit._clear()
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(None)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    tracker = resource_tracker._resource_tracker
    tracker._fd, tracker._pid = None, None  # pyright: ignore[reportAttributeAccessIssue]
    _leave_process_groups()
    torch.manual_seed(_TORCH_SEED)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    try:
        import uvloop
    except ImportError:
        return
    uvloop.run = asyncio.run  # its processes are not `subprocess`'s; test_main_job runs it


def _leave_process_groups() -> None:
    """What `destroy_process_group` does, but that nothing is shut down: the threads of a group stay with the parent."""
    world = distributed_c10d._world
    _KEPT.append([*world.pg_map.items(), *world.pg_names])  # their ends would wait for those threads
    distributed_c10d._update_default_pg(None)
    for of_groups in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        of_groups.clear()
    distributed_c10d._unregister_all_process_groups()
    world.group_count = 0
