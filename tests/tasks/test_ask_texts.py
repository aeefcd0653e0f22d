"""Two people's tasks against one server with the embedded model: ask a PDF, and ask a folder of code."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from longreach.util.safe_path import environment, module_command

from tests.pdfs import pdf
from tests.server.api.embedded import EmbeddedServer

PAGES = (
    "The parties met in Bergen.\nThe minutes of the meeting are in the annex.",
    "The annual fee of the licence is 4180 crowns.\nIt is paid in two parts.",
    None,
    "The parties may end the contract.\nThey write a letter for that.",
)
FILES = {
    "app/main.py": "from app.server import serve\n\nserve()\n",
    "app/server.py": "# The port of the metrics server is 9187.\nMETRICS = 9187\n\n\ndef serve():\n    ...\n",
    "README.md": "# A small application\n\nIt serves one page.\n",
    "uv.lock": "The port of the metrics server is 1.\n",
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(max_model_len=4096, kv_cache_memory="64MiB", max_num_seqs=2) as started:
        yield started


def test_ask_a_pdf(server: EmbeddedServer) -> None:
    client = server.openai
    file = client.files.create(file=("licence.pdf", pdf(*PAGES)), purpose="user_data")
    question = "What is the annual fee of the licence?"
    content: Any = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": question}]
    answer = client.chat.completions.create(
        model="longreach-default", messages=[{"role": "user", "content": content}], max_tokens=24
    )
    assert "4180" in (answer.choices[0].message.content or "")


def test_ask_a_folder_of_code(server: EmbeddedServer, tmp_path: Path) -> None:
    for path, text in FILES.items():
        (tmp_path / "project" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / path).write_text(text)
    lines = "/folder project\nWhat is the port of the metrics server?\n/quit\n"
    chat = subprocess.run(
        module_command("longreach", "chat", server.url, "--max-tokens", "24"),
        input=lines,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(os.environ),
        timeout=120,
        check=True,
    )
    assert "project: 3 files, " in chat.stdout
    assert "left out: 1 lock files" in chat.stdout
    assert "9187" in chat.stdout.partition("next message")[2]
