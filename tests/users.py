"""A second user of the machine: a real one where tests run as root, otherwise this process pretends to be another user."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

OTHER = 34567
IS_ROOT = os.getuid() == 0


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> int:
    """Makes these files and folders, without what is in them, another user's, and returns the uid that now owns them."""
    if IS_ROOT:
        for path in paths:
            os.chown(path, OTHER, OTHER, follow_symlinks=False)
        return OTHER
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    return os.getuid()


@contextlib.contextmanager
def denied(path: Path) -> Iterator[None]:
    """This process may not read the folder: it is another user's and private, or has no mode at all."""
    if IS_ROOT:
        for above in path.parents[:-2]:
            above.chmod(stat.S_IMODE(above.stat().st_mode) | 0o555)
        os.chown(path, OTHER, OTHER)
        os.seteuid(OTHER + 1)
    else:
        path.chmod(0)
    try:
        yield
    finally:
        if IS_ROOT:
            os.seteuid(0)
        else:
            path.chmod(0o700)
