"""The image's HEALTHCHECK: exit 0 if the server in this container takes requests, else 1. The image has no curl."""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

_TIMEOUT_SECONDS = 4  # below the HEALTHCHECK's own, so that the reason gets printed
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}


def ready_url() -> str:
    """The address of /ready, from the variables that tell the server where to listen; flags are not seen here."""
    host = os.environ.get("LONGREACH_HOST") or "127.0.0.1"
    host = _LOOPBACK.get(host, host).strip("[]")
    port = os.environ.get("LONGREACH_PORT") or "8000"
    scheme = "https" if os.environ.get("LONGREACH_SSL_CERTFILE") else "http"
    return f"{scheme}://[{host}]:{port}/ready" if ":" in host else f"{scheme}://{host}:{port}/ready"


def main() -> int:
    """Ask once, print the answer or the reason, and return the exit status."""
    url = ready_url()
    own = ssl.create_default_context()
    own.check_hostname, own.verify_mode = False, ssl.CERT_NONE  # the certificate is for the names that others use
    # A proxy is for the world outside.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=own))
    try:
        with direct.open(url, timeout=_TIMEOUT_SECONDS) as answer:
            print(answer.read(200).decode(errors="replace"))
        return 0
    except urllib.error.HTTPError as error:
        print(f"{url}: {error.code} {error.read(200).decode(errors='replace')}")
    except OSError as error:
        print(f"{url}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
