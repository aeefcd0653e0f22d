"""What metrics have in common: labels, buckets, and the bands of prompt length."""

from __future__ import annotations

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LABELS = ("model_name", "engine")
ENGINE = "0"

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
               640, 2560)  # fmt: skip
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1)
COUNT = tuple(mantissa * 10**exponent for exponent in range(7) for mantissa in (1, 2, 5))

# Upper ends of the bands of prompt length, in tokens, and what each is called.
_BANDS = ((4096, "0-4k"), (16384, "4k-16k"), (65536, "16k-64k"), (262144, "64k-256k"), (2**20, "256k-1M"))
_LAST_BAND = "over 1M"


def band(prompt_tokens: int) -> str:
    """The name of the band that a prompt's length is in."""
    return next((name for end, name in _BANDS if prompt_tokens <= end), _LAST_BAND)
