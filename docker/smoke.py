"""Ask a running server for a fact hidden in a prompt of 16K tokens; exit 1 if the answer lacks it.

Needs the standard library alone. Usage: python smoke.py http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pydoc_data.topics import topics

KEY = "48213"
MIN_PROMPT_TOKENS = 16_384
_TIMEOUT_SECONDS = 300


def prompt() -> str:
    """A book that every Python has, the pass key at two fifths of it, and the question at the end."""
    book = "\n".join(topics.values())[:50_000]
    fact = f"\nThe pass key for the silver lantern is {KEY}.\n"
    return f"{book[:20_000]}{fact}{book[20_000:]}\nWhat is the pass key for the silver lantern?\nAnswer:"


def main(url: str) -> int:
    """Ask, print what came back, and return the exit status."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/v1/models", timeout=_TIMEOUT_SECONDS) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": prompt(), "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.monotonic()
    with direct.open(request, timeout=_TIMEOUT_SECONDS) as answer:
        result = json.load(answer)
    seconds = time.monotonic() - start
    text, tokens = result["choices"][0]["text"], result["usage"]["prompt_tokens"]
    print(f"{model}: {tokens} prompt tokens, {seconds:.1f} s, answer {text!r}")
    if tokens < MIN_PROMPT_TOKENS:
        print(f"the prompt has fewer than {MIN_PROMPT_TOKENS} tokens", file=sys.stderr)
        return 1
    if KEY not in text:
        print(f"the answer lacks the pass key {KEY}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
