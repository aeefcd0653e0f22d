"""The faults can still be planted: `python -m tests.planted_faults` plants them, which takes minutes."""

from __future__ import annotations

import pytest

from tests.planted_faults import FAULTS, ROOT, Fault, main, occurrences


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_is_replaced_is_in_the_file_once(fault: Fault) -> None:
    assert occurrences(fault) == 1, f"{fault.file}: {fault.old!r}"
    assert fault.new != fault.old
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert not name or f"def {name}(" in (ROOT / path).read_text(), test


def test_the_faults_are_different_ones() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 15


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no such thing"], 1) == 2
    assert FAULTS[0].name in capsys.readouterr().err
