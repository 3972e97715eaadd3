"""Random histories of nodes lose no message, send none early, and end with empty stores."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.delay.histories import Accident, History, prepare
from tests.scale import soak


def _problems(
    seeds: Iterable[int], folder: Path, monkeypatch: pytest.MonkeyPatch, accident: Accident
) -> dict[int, list[str]]:
    fuse = prepare(monkeypatch, accident)
    logging.disable(logging.CRITICAL)
    try:
        found = {seed: History(seed, folder / str(seed), fuse, accident).run() for seed in seeds}
    finally:
        logging.disable(logging.NOTSET)
    return {seed: problems for seed, problems in found.items() if problems}


@pytest.mark.parametrize("accident", Accident)
def test_random_histories_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accident: Accident) -> None:
    assert _problems(range(20 if accident is Accident.NOTHING else 8), tmp_path, monkeypatch, accident) == {}


@soak
@pytest.mark.parametrize("accident", Accident)
def test_many_random_histories_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accident: Accident
) -> None:
    assert _problems(range(1000, 1400), tmp_path, monkeypatch, accident) == {}
