"""Random histories of nodes lose no message, send none early, and end with empty stores."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.delay.histories import History, prepare
from tests.scale import soak


def _problems(
    seeds: Iterable[int], folder: Path, monkeypatch: pytest.MonkeyPatch, remade: bool
) -> dict[int, list[str]]:
    fuse = prepare(monkeypatch, remade)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    found = {seed: History(seed, folder / str(seed), fuse, remade).run() for seed in seeds}
    return {seed: problems for seed, problems in found.items() if problems}


@pytest.mark.parametrize("remade", [False, True])
def test_random_histories_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remade: bool) -> None:
    assert _problems(range(8 if remade else 20), tmp_path, monkeypatch, remade) == {}


@soak
@pytest.mark.parametrize("remade", [False, True])
def test_many_random_histories_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remade: bool) -> None:
    assert _problems(range(1000, 1400), tmp_path, monkeypatch, remade) == {}
