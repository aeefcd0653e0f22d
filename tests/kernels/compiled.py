"""What a module compiles for GPUs that are not there, in a process of its own and with a cache that outlives the run.

Triton names what it has compiled by its source, options and version, so that a kernel that has changed is compiled anew
and nothing else is. LONGREACH_TEST_CACHE is the cache's folder, `~/.cache/longreach/test-kernels` where it is not set.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = "LONGREACH_TEST_CACHE"
_ROOT = Path(__file__).parents[2]
_DAYS = 30


def compiled(module: str, *arguments: str) -> dict[str, Any]:
    """What ``python -m module`` prints as JSON, outside Triton's interpreter, which is another language."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache_folder()), "TRITON_STORE_BINARY_ONLY": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


def cache_folder() -> Path:
    """The cache's folder, without what was compiled more than 30 days ago.

    Raises:
        RuntimeError: nothing can be written there.
    """
    folder = Path(os.environ.get(FOLDER) or "~/.cache/longreach/test-kernels").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(f"{folder}: {error}; name a folder that can be written to in {FOLDER}") from error
    for entry in folder.iterdir():
        if time.time() - entry.stat().st_mtime > _DAYS * 86_400:
            shutil.rmtree(entry, ignore_errors=True)  # another run may have been quicker
    return folder
