"""``make cast`` records only a run that shows what the picture is for."""

from __future__ import annotations

import sys

import pytest

from docs import record_demo

KILL = b"\x1b[1;31mkill -9 of Spark's driver in batch 23, 6 of its totals stored ... Spark starts again\x1b[0m\r\n"
BETWEEN = b"\x1b[1;31mkill -9 of Spark's driver between two batches ... Spark starts again\x1b[0m\r\n"
END = b"25,011 = 25,011 = 25,011. All agree.\r\n"


def recorded(*parts: bytes) -> list[bytes]:
    return [part for _, part in record_demo.checked(iter(enumerate(parts)))]


def test_a_run_with_a_kill_in_a_batch_is_recorded() -> None:
    parts = [KILL[:20], KILL[20:], END]
    assert recorded(*parts) == parts


@pytest.mark.parametrize(("parts", "reason"), [((KILL,), "All agree"), ((BETWEEN, END), "not killed in a batch")])
def test_a_run_without_kill_or_end_is_not_recorded(parts: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(SystemExit, match=f"nothing is recorded.*{reason}"):
        recorded(*parts)


def test_all_that_the_command_prints_is_read_with_its_time() -> None:
    program = "import time; print('one', flush=True); time.sleep(0.2); print('two')"
    parts = list(record_demo.record([sys.executable, "-c", program]))
    assert b"".join(part for _, part in parts) == b"one\r\ntwo\r\n"
    assert parts[-1][0] >= parts[0][0] + 0.1


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        list(record_demo.record([sys.executable, "-c", "raise SystemExit(3)"]))
