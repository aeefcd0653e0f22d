"""This process and those that it starts import only what is installed, never what lies in the current folder.

Python puts the current folder first in `sys.path` for `python -m` and `python -c`; `multiprocessing` uses the latter.
Whoever serves a model from inside its folder would run that folder's `torch.py`. `-P` and PYTHONSAFEPATH (Python 3.11)
prevent it; the variable also reaches processes that libraries start. An empty entry of PYTHONPATH is that folder, too,
most often by accident (`PYTHONPATH=$PYTHONPATH:/opt/more`), and is dropped. Entries with a name stay.
"""

# Nothing is imported here, not even from __future__, that Python itself has not imported at its start: this module runs
# while the current folder may still come first.
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def module_command(module: str, *arguments: str) -> list[str]:
    """The command of a child process that runs `module`; start it with `environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(given: "Mapping[str, str]") -> dict[str, str]:
    """`given` as a child process should have it, so that the child and all below it hold to the rule."""
    held = {**given, "PYTHONSAFEPATH": "1"}
    if "PYTHONPATH" in held:
        held["PYTHONPATH"] = os.pathsep.join(_named(held["PYTHONPATH"]))
    return held


def hold() -> None:
    """Hold this process to the rule, its imports from now on and what it starts. A second call changes nothing."""
    path = os.environ.get("PYTHONPATH", "")
    dropped = {""}  # of `python -c`
    if path and "" in path.split(os.pathsep):
        dropped.add(os.getcwd())
    named = [os.path.abspath(entry) for entry in _named(path)]
    sys.path[:] = [entry for entry in sys.path if entry not in dropped or entry in named]
    os.environ.update(environment(os.environ))


def drop_main_folder() -> None:
    """Take away the folder that `python -m` put first, which is the current one; for the module that it runs."""
    if not sys.flags.safe_path:
        del sys.path[0]


def _named(path: str) -> list[str]:
    return [entry for entry in path.split(os.pathsep) if entry]
