"""The endpoints of attention policies, as a browser sees them, for servers that have no model."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

BLOCK = 128
CELLS = 64

POLICIES = [
    {"policy": "dense", "description": "Every token sees all before it.", "parameters": {}},
    {
        "policy": "window",
        "description": "Every token sees the last ones and the first ones.",
        "parameters": {
            "size": {"type": "integer", "minimum": 1, "maximum": 2**20, "default": 4096, "description": "Last tokens."},
            "sinks": {"type": "integer", "minimum": 0, "maximum": 4096, "default": 4, "description": "First tokens."},
        },
    },
    {
        "policy": "dynamic",
        "description": "Keys chosen by the text.",
        "parameters": {
            "recall": {"type": "number", "minimum": 0.01, "maximum": 1, "default": None, "description": "A share."},
            "density": {"type": "number", "minimum": 0.01, "maximum": 1, "default": None, "description": "A `share`."},
            "estimator": {
                "type": "string",
                "values": ["antidiagonal", "pooled"],
                "default": "antidiagonal",
                "description": "How keys are chosen.",
            },
        },
    },
]


def mask(policy: str, length: int, size: int = 0) -> dict[str, Any]:
    """The answer about a mask on a grid of 64 by 64 cells."""
    seen = CELLS if policy == "dense" else max(round(size / length * CELLS), 1)
    grid = [[100 if j <= i and i - j < seen else 0 for j in range(CELLS)] for i in range(CELLS)]
    density = sum(map(sum, grid)) / (50 * CELLS * (CELLS + 1))
    tiles = (length // BLOCK) ** 2 // 2
    return {
        "policy": policy,
        "length": length,
        "block": BLOCK,
        "density": density,
        "tiles_visited": round(tiles * density),
        "tiles_total": tiles,
        "flops_saved_share": 1 - density,
        "grid": grid,
    }


def answer_policies(route: Any) -> None:
    """Answer a request of the page in the server's place."""
    url = urlsplit(route.request.url)
    if url.path.endswith("/policies"):
        route.fulfill(json={"object": "list", "data": POLICIES, "default": "dense"})
        return
    asked = {name: values[0] for name, values in parse_qs(url.query).items()}
    refused = {"type": "invalid_request_error", "code": "invalid_value"}
    if asked["policy"] == "dynamic":
        refused |= {"message": "`policy`: dynamic chooses by the prompt.", "param": "policy"}
        route.fulfill(status=400, json={"error": refused})
        return
    if asked["policy"] == "window" and int(asked["size"]) < 1:
        refused |= {"message": "attention.size: give 1 to 1048576.", "param": "size"}
        route.fulfill(status=400, json={"error": refused})
        return
    route.fulfill(json=mask(asked["policy"], int(asked["length"]), int(asked.get("size", 0))))
