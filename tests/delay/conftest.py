"""Nodes of the delay service for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.delay.nodes import World, at_once


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    at_once(monkeypatch)
    one = World(tmp_path)
    yield one
    for node in one.nodes.values():
        node.store.close()
