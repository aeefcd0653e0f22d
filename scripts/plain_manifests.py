"""The plain manifests of docker/kubernetes, made of the Helm chart, and the chart's list of the server's settings.

    python scripts/plain_manifests.py            # writes them; needs helm
    python scripts/plain_manifests.py --check    # says what is out of date, and ends with 1 if anything is

The chart is what is maintained. The manifests are for clusters without Helm: they are the chart's with the values of
examples/volume.yaml.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from longreach.config import Settings

DOCKER = Path(__file__).parents[1] / "docker"
CHART = DOCKER / "helm" / "longreach"
SCHEMA = CHART / "values.schema.json"
PLAIN = DOCKER / "kubernetes"
VALUES = CHART / "examples" / "volume.yaml"

# Settings that follow from other values of the chart, or that a pod cannot have.
OF_CHART = {
    *("model", "revision", "host", "port", "api_key", "api_key_file", "allow_unauthenticated", "handover"),
    *("ssl_certfile", "ssl_keyfile"),  # TLS ends at the gateway
}

# The manifests by name: which templates they have, and what is said at their head.
FILES = {
    "volumes.yaml": (("volumes.yaml",), "The models, written by whoever brings them, and compiled kernels."),
    "network.yaml": (("network.yaml",), "Pods labelled longreach-client=true may ask, and nobody is asked."),
    "server.yaml": (("deployment.yaml", "service.yaml"), "One server on one GPU. docs/kubernetes.md has the order."),
}
_HEAD = (
    "# Made of docker/helm/longreach by scripts/plain_manifests.py, which writes it again: change the chart.\n# {}\n"
)
# Nobody installs these with Helm.
_OF_HELM = re.compile(r"^ +(helm\.sh/[\w-]+|app\.kubernetes\.io/managed-by): .*\n", re.MULTILINE)
_EMPTY_ANNOTATIONS = re.compile(r"^ +annotations:\n(?: +#.*\n)*(?=\w)", re.MULTILINE)


def helm() -> str | None:
    """Where helm is, if it is on the path."""
    return shutil.which("helm")


def render(helm: str, *flags: str | Path) -> subprocess.CompletedProcess[str]:
    """`helm template` of the chart, as a release called longreach."""
    command = [helm, "template", "longreach", CHART, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def manifest(helm: str, name: str) -> str:
    """The text of one plain manifest.

    Raises:
        RuntimeError: helm refuses the chart; says why.
    """
    templates, said = FILES[name]
    parts = []
    for template in templates:
        done = render(helm, "--values", VALUES, "--show-only", f"templates/{template}")
        if done.returncode:
            raise RuntimeError(done.stderr)
        parts.append(done.stdout)
    text = "".join(parts)
    text = re.sub(r"^# Source: .*\n", "", text, flags=re.MULTILINE)
    text = _EMPTY_ANNOTATIONS.sub("", _OF_HELM.sub("", text))
    lines = [line.rstrip() for line in text.splitlines()]
    text = "\n".join(line for line in lines if line)
    return _HEAD.format(said) + text.removeprefix("---\n") + "\n"


def schema() -> str:
    """The text of the values' schema, with the names of the server's settings as they are now."""
    loaded = json.loads(SCHEMA.read_text())
    loaded["properties"]["settings"]["propertyNames"]["enum"] = sorted(set(Settings.model_fields) - OF_CHART)
    return json.dumps(loaded, indent=1) + "\n"


def main() -> int:
    """Write or check all files; the exit status."""
    arguments = argparse.ArgumentParser(description="Make docker/kubernetes of the Helm chart.")
    arguments.add_argument("--check", action="store_true", help="write nothing; end with 1 if something is out of date")
    check = arguments.parse_args().check
    texts = {SCHEMA: schema()}
    if (found := helm()) is None:
        print("helm is not installed: only the schema is made", file=sys.stderr)
    else:
        if not check:
            SCHEMA.write_text(texts[SCHEMA])  # helm reads it
        texts |= {PLAIN / name: manifest(found, name) for name in FILES}
    old = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    for path in old:
        if check:
            print(f"{path.relative_to(DOCKER.parent)} is out of date: run scripts/plain_manifests.py", file=sys.stderr)
        else:
            path.write_text(texts[path])
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
