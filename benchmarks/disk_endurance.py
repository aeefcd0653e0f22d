"""A disk that is a tenth of the documents that are asked about, for ten minutes: its bound, failures, and hits by tier.

    python -m benchmarks.disk_endurance llama-8b --disk /tmp/pages --out result.json
    python -m benchmarks.disk_endurance wide-pages --document-tokens 512 --disk /tmp/pages --out result.json

Clients ask about documents, the first of them often and the last seldom (Zipf). Device and host memory have a quarter
of the disk each. All the while the files are summed as the file system counts them. Afterwards the server's log is
searched for errors. What the disk gives stands beside an LRU of whole documents with as many bytes.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import re
import shlex
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longreach.bench.launch import described, longreach, model_of
from longreach.bench.summary import environment
from longreach.setting_values import parse_bytes

from benchmarks.disk_restart import files
from benchmarks.file_watch import Watch, folder_bytes

_QUESTION, _ANSWER = 16, 4  # tokens
_TIERS = ("gpu", "host", "disk")
_OF_DISK = 4  # times as much as the device has, and as host memory has
_TIMES = 10  # as many bytes of documents as of the disk
_PATIENCE = 600.0
_TOLD = 5  # failures
_ERRORS = re.compile(r" (?:ERROR|CRITICAL) |Traceback")


class Lru:
    """Whole documents of one size, of which the `most` that were used last are kept.

    Attributes:
        hits: uses of what was there.
    """

    def __init__(self, most: int) -> None:
        self.hits = 0
        self._most = most
        self._kept: OrderedDict[int, None] = OrderedDict()

    def use(self, document: int) -> None:
        """Ask for a document, which then is there."""
        self.hits += document in self._kept
        self._kept[document] = None
        self._kept.move_to_end(document)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


class Asking:
    """Some clients that ask one server about documents, and what came of it."""

    def __init__(self, url: str, documents: int, tokens: int, skew: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._address = parts.hostname, parts.port or 80
        self._lock = threading.Lock()
        self._tokens = tokens
        self._draw = random.Random(0)
        self._weights = list(itertools.accumulate(1 / (rank + 1) ** skew for rank in range(documents)))
        self._numbers = range(documents)
        self.model = json.loads(self._get("/v1/models"))["data"][0]["id"]
        self.asked: list[int] = []  # documents, in order
        self.by_tier: Counter[str] = Counter()  # tokens of prompts
        self.failures: list[str] = []

    def until(self, end: float) -> None:
        """Ask one question after another until some moment of `time.monotonic`."""
        while time.monotonic() < end:
            with self._lock:
                [document] = self._draw.choices(self._numbers, cum_weights=self._weights)
                self.asked.append(document)
                question = [self._draw.randrange(16, 500) for _ in range(_QUESTION)]
            own = random.Random(document)
            prompt = [own.randrange(16, 500) for _ in range(self._tokens)] + question
            try:
                usage = self._ask(prompt)
            except (OSError, http.client.HTTPException, ValueError) as error:
                with self._lock:
                    self.failures.append(repr(error)[:500])
                time.sleep(1.0)
                continue
            with self._lock:
                self.by_tier.update({tier: usage["cache"][tier] for tier in _TIERS})
                self.by_tier["computed"] += usage["prompt_tokens"] - usage["cache"]["cached_tokens"]

    def metric(self, name: str) -> int:
        """A figure of the server's metrics."""
        found = re.search(rf"^longreach:{name}(?:_total)?{{.*}} (\S+)$", self._get("/metrics"), re.MULTILINE)
        if found is None:
            raise ValueError(f"the server does not tell longreach:{name}")
        return round(float(found[1]))

    def _ask(self, prompt: list[int]) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": _ANSWER, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection(*self._address, timeout=_PATIENCE)
        try:
            fields = json.dumps(body | {"return_cache_usage": True})
            connection.request("POST", "/v1/completions", fields, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(f"{response.status}: {answer[:400]!r}")
        return json.loads(answer)["usage"]

    def _get(self, path: str) -> str:
        connection = http.client.HTTPConnection(*self._address, timeout=_PATIENCE)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()


def measure(
    target: str,
    disk: Path,
    bound: int,
    tokens: int,
    bytes_a_token: int,
    seconds: float,
    clients: int,
    skew: float,
    flags: Sequence[str],
) -> dict[str, Any]:
    """What goes to JSON.

    Raises:
        ValueError: the folder is not empty.
    """
    if any(disk.iterdir()):
        raise ValueError(f"{disk} has files; name an empty folder")
    documents = round(_TIMES * bound / (bytes_a_token * tokens))
    memory = str(bound // _OF_DISK)
    flags = ["--kv-cache-memory", memory, "--kv-offload-bytes", memory, "--kv-disk-bytes", str(bound), *flags]
    with model_of(target) as model, longreach(model, [*flags, "--kv-disk", str(disk)]) as running:
        asking = Asking(running.url, documents, tokens, skew)
        end = time.monotonic() + seconds
        minutes: list[dict[str, Any]] = []
        with Watch(disk) as watch:
            threads = [threading.Thread(target=asking.until, args=(end,), daemon=True) for _ in range(clients)]
            for thread in threads:
                thread.start()
            while time.monotonic() < end:
                time.sleep(min(60.0, max(0.1, end - time.monotonic())))
                minutes.append({"asked": len(asking.asked), "tokens": dict(asking.by_tier), "most_bytes": watch.most})
                print(minutes[-1], asking.failures[:_TOLD], file=sys.stderr, flush=True)
            for thread in threads:
                thread.join()
            while asking.metric("kv_disk_unwritten"):
                time.sleep(0.2)
            time.sleep(1.0)  # the metrics tell of all that was done
        names = ("written_bytes", "read_bytes", "evicted", "refused", "damaged", "failed", "entries", "bytes")
        told = {name: asking.metric(f"kv_disk_{name}") for name in names}
        assert running.log is not None
        said = running.log.read_text(errors="replace").splitlines()
    lru = Lru(int(bound / (bytes_a_token * tokens)))
    for document in asking.asked:
        lru.use(document)
    return {
        "environment": environment(),
        "model": described(target),
        "flags": " ".join(flags),
        "disk_bytes": bound,
        "documents": documents,
        "document_tokens": tokens,
        "document_bytes": bytes_a_token * tokens,
        "skew": skew,
        "clients": clients,
        "seconds": seconds,
        "endured": {
            "asked": len(asking.asked),
            "different": len(set(asking.asked)),
            "tokens": dict(asking.by_tier),
            "lru_hits": lru.hits / len(asking.asked),
            "failures": len(asking.failures),
            "first_failures": asking.failures[:_TOLD],
            "error_lines": [line[:500] for line in said if _ERRORS.search(line)],
            "warnings": sum(" WARNING " in line for line in said),
            "most_bytes": watch.most,
            "looks": watch.looks,
            "folder_bytes": folder_bytes(disk),
            "file_bytes": files(disk)[0].stat().st_size,
            "disk": told,
            "minutes": minutes,
        },
    }


def table(result: dict[str, Any]) -> str:
    """Where tokens came from, and what happened on the disk."""
    lines = [
        ["questions", "from the device", "host memory", "the disk", "computed", "an LRU of documents would have"],
        ["---:"] * 6,
    ]
    seen, bound = result["endured"], result["disk_bytes"]
    count = sum(seen["tokens"].values())
    shares = [f"{100 * seen['tokens'][tier] / count:.1f}%" for tier in (*_TIERS, "computed")]
    lines.append([f"{seen['asked']:,}", *shares, f"{100 * seen['lru_hits']:.1f}%"])
    told, where = seen["disk"], result["environment"]
    size, together = result["document_bytes"] / 1e6, result["documents"] * result["document_bytes"] / 1e9
    caption = (
        f"{result['documents']} documents of {size:.0f} MB, {together:.1f} GB together, of which {seen['different']} "
        f"were asked about in {result['seconds']:.0f} s by {result['clients']} clients (Zipf {result['skew']:g}). Of "
        f"at most {bound / 1e9:.3f} GB, {seen['most_bytes'] / 1e9:.3f} were the most in {seen['looks']:,} sums; "
        f"{told['written_bytes'] / 1e9:.1f} GB written, {told['read_bytes'] / 1e9:.1f} GB read, {told['evicted']:,} "
        f"files evicted, {told['refused']:,} not written. Failed requests: {seen['failures']}; lines of errors: "
        f"{len(seen['error_lines'])}; damaged files: {told['damaged']}. "
        f"{result['model'].get('shape') or result['model']['name']}; {where['device']}; torch "
        f"{where['versions']['torch']}; {where['date']}."
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def main() -> None:
    """Measure, write the JSON, print the table, and fail where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="llama-8b", help="a shape (llama-8b, wide-pages) or a directory")
    parser.add_argument("--disk", type=Path, required=True, help="an empty directory for the pages")
    parser.add_argument("--kv-disk-bytes", default="1GB", help="a tenth of the documents")
    parser.add_argument("--document-tokens", type=int, default=2048)
    parser.add_argument("--bytes-a-token", type=int, default=128 * 1024, help="in the KV cache; that of llama-8b")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--skew", type=float, default=1.0, help="the exponent of Zipf's law")
    parser.add_argument("--serve-flags", default="", help="more of them, in one argument")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    options = parser.parse_args()
    options.disk.mkdir(parents=True, exist_ok=True)
    result = measure(
        options.target,
        options.disk,
        parse_bytes(options.kv_disk_bytes, "--kv-disk-bytes"),
        options.document_tokens,
        options.bytes_a_token,
        options.seconds,
        options.clients,
        options.skew,
        shlex.split(options.serve_flags),
    )
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    seen = result["endured"]
    if seen["failures"] or seen["error_lines"] or seen["most_bytes"] > result["disk_bytes"]:
        sys.exit("a promise was broken: see the table")


if __name__ == "__main__":
    main()
