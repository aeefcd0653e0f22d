"""The documentation site builds in strict mode, holds every page, and fetches nothing from other hosts."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import longreach
import pytest

ROOT = Path(__file__).resolve().parents[1]
_FETCHED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    out = tmp_path / "site"
    command = [sys.executable, ROOT / "docs" / "site.py", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")]
    pages = [file.parent if file.stem == "README" else file.with_suffix("") for file in files]  # a README is an index
    assert pages
    assert [page for page in pages if not (out / page / "index.html").exists()] == []
    fetched = [found for page in out.rglob("*.html") for found in _FETCHED.findall(page.read_text())]
    assert fetched == []
    start = (out / "index.html").read_text()
    assert f"longreach {longreach.__version__}" in start
    assert start.count('name="__palette"') == 3, "light, dark, and as the system has it"
    sections = re.findall(r'class="md-tabs__link">\s*(\w+)', start)
    assert sections == ["Start", "Guides", "Reference", "Architecture", "Measured", "Decisions"]


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("[gone](docs/no-such-page.md)", "docs/no-such-page.md"),
        ("[gone](docs/api.md#no-such-heading)", "no-such-heading"),
    ],
)
def test_a_link_that_leads_nowhere_ends_the_build(
    site: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    link: str,
    said: str,
) -> None:
    for source in ("docs", "training", "benchmarks/results", "server/longreach/default_model"):
        shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    for file in (*ROOT.glob("*.md"), ROOT / "pyproject.toml"):
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text() + f"\n{link}\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    assert site.build(tmp_path / "site") != 0
    assert said in "".join(capfd.readouterr())


def test_a_page_that_the_navigation_does_not_name_is_there_all_the_same(site: ModuleType) -> None:
    pages = ["README.md", "docs/api.md", "docs/adr/0010-fp8-prefill.md", "docs/adr/README.md", "docs/docker.md"]
    nav = [{"Start": "README.md"}, {"Reference": [{"The API": "docs/api.md"}]}, {"Decisions": ["docs/adr/README.md"]}]
    assert site.navigation(nav, pages) == [*nav, {"More": [{"Docker": "docs/docker.md"}]}]
    assert site.navigation(nav, pages[:-1]) == nav


def test_a_folder_that_is_no_site_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    command = [sys.executable, ROOT / "docs" / "site.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "holds no earlier site" in done.stderr
    assert (tmp_path / "thesis.txt").exists()
