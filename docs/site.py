"""Build the documentation site into a folder: `python docs/site.py site`.

The pages lie where a reader of the repository looks for them: the README at the top, others in docs/ and beside what
they describe. They are put into one tree under the same paths, so that their links to one another and to pictures hold;
a link to a file of the repository that is no page becomes plain text. MkDocs runs in strict mode: a link or an anchor
that leads nowhere ends the build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    *(
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "CODE_OF_CONDUCT.md",
        "SECURITY.md",
        "docs/*.md",
        "docs/adr/*.md",
        "docs/dev/*.md",
        "docs/pictures/*.png",
        "docs/site.css",
    ),
    *("benchmarks/results/*.png", "training/README.md", "training/*.png", "server/longreach/default_model/README.md"),
)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_DECISION = re.compile(r"docs/adr/\d")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def stage(pages: Path) -> list[str]:
    """Put all pages and pictures below `pages` under their paths in the repository; the paths of the pages."""
    files = sorted(file for source in SOURCES for file in ROOT.glob(source))
    staged = {file.relative_to(ROOT) for file in files}
    for path in staged:
        target = pages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = _FRONT_MATTER.sub("", (ROOT / path).read_text())
            target.write_text(_without_links_to_sources(text, path, staged))
        else:
            shutil.copyfile(ROOT / path, target)
    return sorted(str(path) for path in staged if path.suffix == ".md")


def _without_links_to_sources(text: str, page: Path, staged: set[Path]) -> str:
    def replaced(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if "://" in target:
            return match[0]
        path = (ROOT / page.parent / target).resolve()
        is_source = path.exists() and path.is_relative_to(ROOT) and path.relative_to(ROOT) not in staged
        return label if is_source else match[0]

    return _LINK.sub(replaced, text)


def navigation(nav: list[Any], pages: list[str]) -> list[Any]:
    """The sections of docs/mkdocs.yml, then pages that it does not name; decisions are named by their index alone."""
    named = set(re.findall(r"[\w./-]+\.md", str(nav)))
    others = [page for page in pages if page not in named and not _DECISION.match(page)]
    return [*nav, {"More": [{_title(page): page} for page in others]}] if others else nav


def _title(page: str) -> str:
    found = _TITLE.search((ROOT / page).read_text())
    return found[1] if found else page


def _version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def build(out: Path) -> int:
    """Build the site into `out`, which is replaced; the exit status of MkDocs."""
    with tempfile.TemporaryDirectory() as scratch:
        config = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())
        pages = stage(Path(scratch) / config["docs_dir"])
        config["nav"] = navigation(config["nav"], pages)
        config["site_name"] += f" {_version()}"
        (Path(scratch) / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
        # Without --quiet, which silences the warnings that strict mode counts.
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out.resolve())]
        command += ["--config-file", f"{scratch}/mkdocs.yml"]
        return subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False).returncode


def main() -> None:
    """Build the site into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write, for example site")
    out = parser.parse_args().out
    if out.exists() and not (out / "sitemap.xml").exists():
        sys.exit(f"site.py: error: {out} is there and holds no earlier site; name another folder")
    sys.exit(build(out))


if __name__ == "__main__":
    main()
