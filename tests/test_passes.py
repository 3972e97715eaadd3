"""Two passes at once: both run whatever the other one says, and a failure of either is one of the whole."""

from __future__ import annotations

import sys

import pytest

from tests import passes


def python(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


# Each waits until the other has begun: neither waits for the other one's end.
WAITING = """
import pathlib, sys, time
mine, other = map(pathlib.Path, {})
mine.touch()
while not other.exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("memory", "servers", "code"), [(0, 0, 0), (1, 0, 1), (0, 5, 5), (2, 1, 2)])
def test_both_run_and_any_failure_counts(memory, servers, code, tmp_path, capfd):
    one, two = str(tmp_path / "memory"), str(tmp_path / "servers")
    ends = f"print('in memory', flush=True); print('and its trouble', file=sys.stderr); sys.exit({memory})"
    found = passes.run(
        python(WAITING.format((one, two)) + ends),
        python(WAITING.format((two, one)) + f"print('with servers'); sys.exit({servers})"),
    )
    assert found == code
    said = capfd.readouterr().out
    assert "with servers\n" in said
    assert "in memory\nand its trouble\n" in said


def test_what_each_pass_runs(monkeypatch):
    commands = []
    monkeypatch.setattr(passes, "run", lambda *both: commands.extend(both) or 0)
    assert passes.main(["--junit-xml=report", "-k", "x"]) == 0
    memory, servers = commands
    assert servers[-3:] == ("--junit-xml=report", "-k", "x")
    # Of two the later one holds: no report.
    assert memory[-4:] == ("--junit-xml=report", "-k", "x", "--junit-xml=")
    (marks,) = [word for word in servers if " or " in word]
    (others,) = [word for word in memory if " and " in word]
    assert others == " and ".join(f"not {mark}" for mark in marks.split(" or "))
