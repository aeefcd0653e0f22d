"""A folder full of modules that must not run: each has the name of an installed one, and notes it if it runs."""

from __future__ import annotations

import pkgutil
import shutil
import sys
from collections.abc import Set
from pathlib import Path

# `python -m longreach` has Python import these from the current folder before our code runs; `python -P -m` does not.
BEFORE_MAIN = {
    "__future__", "collections", "contextlib", "functools", "importlib", "keyword", "longreach", "operator", "reprlib",
    "types", "warnings",
}  # fmt: skip


class Poison:
    """Modules in `folder`, but for those in `spare`; `ran` says which of them have run."""

    def __init__(self, folder: Path, spare: Set[str] = frozenset()) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._mark = folder / "ran"
        line = f"import os; open({str(self._mark)!r}, 'a').write(f'{{__name__}} {{os.getpid()}}\\n')\n"
        installed = {module.name for module in pkgutil.iter_modules()}
        for name in (installed | set(sys.stdlib_module_names) | {"sitecustomize", "usercustomize"}) - spare:
            if len(name) % 2:  # a module or a package, both would do
                (folder / f"{name}.py").write_text(line)
            else:
                (folder / name).mkdir()
                (folder / name / "__init__.py").write_text(line)

    @property
    def ran(self) -> str:
        """A line for each module that has run, with its process."""
        return self._mark.read_text() if self._mark.exists() else ""


def poisoned_model(model: Path, folder: Path, spare: Set[str] = frozenset()) -> Poison:
    """A copy of a model in `folder`, which brings such modules."""
    shutil.copytree(model, folder)
    return Poison(folder, spare)
