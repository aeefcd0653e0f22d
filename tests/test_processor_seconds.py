"""What tests cost includes processes that are killed and that nobody waits for."""

from __future__ import annotations

import subprocess
import sys

from tests.processor_seconds import count, used

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nimport signal; signal.pause()"


def test_a_process_that_is_to_be_killed_is_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = used()
        count([process.pid])
        assert 0.25 < used() - before < 5
        process.kill()
    count([process.pid])  # there is none any more
