"""Who may use the server: API keys, kept as hashes.

A key may have a name, which stands in the log in its place. What one key's requests leave in the prefix cache is not
found by those of another: the time that an answer takes tells nobody what others have asked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from longreach.config import Settings
from longreach.errors import ConfigError, quoted

_KEY = re.compile(r"[!-9;-~]{8,512}")  # visible ASCII without a colon
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

# On the raw path: whatever is spelled in another way needs a key.
OPEN_PATHS = frozenset({b"/health", b"/ready"})


@dataclass(frozen=True)
class ApiKey:
    """A key by its name; `digest` is the key's SHA-256."""

    name: str
    digest: bytes

    def salt(self, own: str) -> str:
        """The prefix cache's salt for a request with this key that asks for the salt `own`."""
        return f"{self.digest.hex()}/{own}"


class ApiKeys:
    """The keys of a server; without any, everybody may use it."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    @classmethod
    def of(cls, settings: Settings) -> ApiKeys:
        """The keys from `--api-key` and `--api-key-file` together.

        Raises:
            ConfigError: the file cannot be read, or something in one of them is no key; does not show the key.
        """
        entries = [("--api-key", entry) for entry in (settings.api_key or "").split(",") if entry.strip()]
        if settings.api_key_file is not None:
            from_file = _lines(settings.api_key_file)
            if not from_file:
                raise ConfigError(f"--api-key-file: {quoted(settings.api_key_file, 256)} has no key in it")
            entries += from_file
        keys = [_parse(source, entry.strip(), index) for index, (source, entry) in enumerate(entries, start=1)]
        for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
            if len(set(values)) < len(values):
                raise ConfigError(f"--api-key: two keys have the same {what}")
        return cls(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def with_digest(self, digest: str) -> ApiKey | None:
        """The key whose SHA-256 this is, in hexadecimal digits."""
        return next((key for key in self._keys if key.digest.hex() == digest), None)

    def find(self, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """The key of a request, or None if it is none of ours, or the request names two.

        Compares with all keys, each in constant time.
        """
        given = given_keys(headers)
        if len(given) != 1:
            return None
        digest = hashlib.sha256(given.pop()).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def given_keys(headers: Mapping[bytes, bytes]) -> set[bytes]:
    """The keys that a request names, by `Authorization: Bearer KEY` or by Anthropic's `x-api-key: KEY`."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    keys = {headers.get(b"x-api-key", b"").strip()}
    if scheme.lower() == b"bearer":
        keys.add(bearer.strip())
    return keys - {b""}


def _lines(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"--api-key-file: {quoted(path, 256)} cannot be read: {why}") from error
    numbered = [(f"--api-key-file, line {number}", line.strip()) for number, line in enumerate(lines, start=1)]
    return [(source, line) for source, line in numbered if line and not line.startswith("#")]


def _parse(source: str, entry: str, index: int) -> ApiKey:
    name, colon, key = entry.partition(":")
    if not colon:
        name, key = f"key{index}", name
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{source}: the name before the colon may have 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    if _KEY.fullmatch(key) is None:
        raise ConfigError(f"{source}: a key must have 8 to 512 visible ASCII characters, and neither comma nor colon")
    return ApiKey(name, hashlib.sha256(key.encode()).digest())
