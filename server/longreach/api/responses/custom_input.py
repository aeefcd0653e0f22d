"""The input of a custom tool, out of the JSON arguments in which the model writes it, as they arrive."""

from __future__ import annotations

import json
import re

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters and escapes; half a surrogate pair waits for its other half.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})+'
)


class CustomInput:
    """Reads `{"input": "..."}` piece by piece. What is no such object is the input as it is, once it has ended."""

    def __init__(self) -> None:
        self.text = ""
        self._raw = ""
        self._at: int | None = None  # how much of the arguments has been read, once the string has begun

    def push(self, arguments: str) -> str:
        """The text that is certain after another piece of the arguments."""
        self._raw += arguments
        if self._at is None:
            opening = _OPENING.match(self._raw)
            if opening is None:
                return ""
            self._at = opening.end()
        whole = _WHOLE.match(self._raw, self._at)
        if whole is None:
            return ""
        self._at = whole.end()
        more: str = json.loads(f'"{whole[0]}"', strict=False)
        self.text += more
        return more

    def flush(self, is_whole: bool) -> str:
        """The arguments have ended, whole or cut; the text that is left."""
        try:
            value = json.loads(self._raw, strict=False) if is_whole else None
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and value.keys() == {"input"} and isinstance(value["input"], str):
            final = value["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        elif self._at is not None:
            final = self.text
        else:
            final = self._raw
        more = final[len(self.text) :] if final.startswith(self.text) else ""
        self.text += more
        return more
