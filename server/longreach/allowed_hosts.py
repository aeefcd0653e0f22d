"""The hosts that a server answers to: what a request's `Host` may name.

A page whose name is made to lead to this machine (DNS rebinding) is of the same origin as the server to a browser, so
neither CORS nor media types keep it out. Its requests name a host that is not the server's.

`localhost` and the names under it lead to loopback addresses everywhere (RFC 6761, section 6.3): nobody can register
one. An address cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

ANY = "*"
MAX_NAMES = 32

# RFC 3986, section 3.2.2: a registered name. Four dotted numbers are one by their letters.
_REG_NAME = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
_AUTHORITY = re.compile(rf"(\[[0-9A-Fa-f:.]+\]|{_REG_NAME})(?::([0-9]{{0,5}}))?")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*\.?")


@dataclass(frozen=True)
class Hosts:
    """Names and addresses as `host_of` gives them; `suffixes` are those of `*.example.com`, with the dot.

    `everything` takes any host, but still one that is well formed.
    """

    names: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()
    everything: bool = False

    @classmethod
    def parse(cls, text: str) -> Hosts:
        """Hosts with commas: names, `*.example.com` for all below `example.com`, addresses, or `*` for any.

        Raises:
            ValueError: an entry is none of these; the message names it.
        """
        entries = [entry.strip() for entry in text.split(",")]
        if len(entries) > MAX_NAMES:
            raise ValueError(f"give {MAX_NAMES} hosts at most")
        if entries == [ANY]:
            return cls(everything=True)
        names: set[str] = set()
        suffixes: list[str] = []
        for entry in entries:
            address = _address(entry[1:-1] if entry.startswith("[") and entry.endswith("]") else entry)
            if address is not None:
                names.add(address)
            elif len(entry) > 253 or _NAME.fullmatch(entry) is None:
                shown = repr(entry[:64]).encode("ascii", "backslashreplace").decode()
                raise ValueError(f"{shown} is no host: give a name or an address without a port, *.example.com, or *")
            elif entry.startswith("*."):
                suffixes.append(entry[1:].lower().removesuffix("."))
            else:
                names.add(entry.lower().removesuffix("."))
        return cls(frozenset(names), tuple(suffixes))

    def __contains__(self, host: str) -> bool:
        """Whether a host, as `host_of` gives it, is one of them. Names of this machine always are."""
        return (
            self.everything
            or host in self.names
            or (bool(self.suffixes) and host.endswith(self.suffixes))
            or is_local(host)
        )


def host_of(authority: str) -> str | None:
    """The host in `host:port`: in lower case, without a trailing dot, an IPv6 address without brackets and in its
    shortest form. None if that is no authority (RFC 9110, section 7.2), or one with a user's name."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None or int(match[2] or 0) > 65535:
        return None
    if match[1].startswith("["):
        return _address(match[1][1:-1])
    return match[1].lower().removesuffix(".")


def is_local(host: str) -> bool:
    """Whether a host, as `host_of` gives it, is this machine by its very name: `localhost`, a name under it, or a
    loopback address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
