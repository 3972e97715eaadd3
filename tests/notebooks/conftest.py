"""A notebook that is run for a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.fix_spark import environment
from tests.notebooks import running


class Done(NamedTuple):
    """What a notebook printed, and how many images it shows."""

    text: str
    images: int


@pytest.fixture
def run_notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Done]:
    """A function that runs the notebook of that name, and compares it with what is stored."""

    def run(name: str) -> Done:
        for variable, value in environment().items():
            monkeypatch.setenv(variable, value)
        done = running.cells(running.run(name))
        as_stored(done, running.cells(running.read(name)))
        return Done("".join(map(running.printed, done)), sum(map(running.pictures, done)))

    return run


def as_stored(done: list[Any], kept: list[Any]) -> None:
    """Cells show what a visitor of the repository sees; numbers may differ, and what pictures show."""
    for now, then in zip(done, kept, strict=True):
        assert running.shape(running.printed(now)) == running.shape(running.printed(then)), "run: make notebooks"
        assert running.pictures(now) == running.pictures(then), "run: make notebooks"
