"""A second user of the machine: a real one where tests run as root, otherwise this process pretends to be another user."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.base import folders, terminal

OTHER = 34567
IS_ROOT = os.getuid() == 0


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> int:
    """Makes these files and folders, without what is in them, another user's, and returns the uid that now owns them."""
    if IS_ROOT:
        for path in paths:
            os.chown(path, OTHER, OTHER, follow_symlinks=False)
        return OTHER
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(folders, "open_private", folders.open_regular)  # locks that this process creates stay its own
    return os.getuid()


def root_beside(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> int:
    """Makes these files and folders, and what is in them, another user's, who can reach them, and this process root. Returns the
    uid that owns them.
    """
    if IS_ROOT:
        for path in paths:
            let_in(path)
            give_away(monkeypatch, path, *path.rglob("*"))
        return OTHER
    owner = os.getuid()
    of_root(monkeypatch, owner + 1)
    rights = [owner + 1]
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    monkeypatch.setattr(os, "geteuid", lambda: rights[0])
    monkeypatch.setattr(os, "seteuid", lambda uid: rights.__setitem__(0, uid))
    monkeypatch.setattr(os, "setreuid", lambda _, uid: rights.__setitem__(0, uid))
    monkeypatch.setattr(os, "setegid", lambda _: None)
    monkeypatch.setattr(os, "setregid", lambda *_: None)
    monkeypatch.setattr(os, "setgroups", lambda _: None)
    return owner


@contextlib.contextmanager
def rights_for_good() -> Iterator[None]:
    """What takes another user's rights for the rest of the process in the block takes them to its end, for the test goes on."""
    before, groups = (os.geteuid(), os.getegid()), os.getgroups()
    with pytest.MonkeyPatch.context() as patch:
        if IS_ROOT:
            patch.setattr(os, "setreuid", lambda _, uid: os.seteuid(uid))
            patch.setattr(os, "setregid", lambda _, gid: os.setegid(gid))
        patch.setattr(folders, "_borrowed_uids", [])
        patch.setattr(terminal, "detach", lambda: None)
        patch.setattr(folders, "forbid_core_dumps", lambda: lambda: None)
        patch.chdir(Path.cwd())  # the end of the block restores it
        try:
            yield
        finally:
            if os.geteuid() != before[0]:
                os.seteuid(before[0])
            if os.getegid() != before[1]:
                os.setegid(before[1])
            if os.getgroups() != groups:
                os.setgroups(groups)


def of_root(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """Root has this uid from here on. The folders of the real root stand for those that a container does not show."""
    monkeypatch.setattr(folders, "ROOT_ID", uid)
    monkeypatch.setattr(folders, "_unmapped_uids", lambda: {0})


def let_in(path: Path) -> None:
    """Other users may go through the folders above."""
    for above in path.parents[:-2]:
        above.chmod(stat.S_IMODE(above.stat().st_mode) | 0o555)


@contextlib.contextmanager
def denied(path: Path) -> Iterator[None]:
    """This process may not read the folder: it is another user's and private, or has no mode at all."""
    if IS_ROOT:
        let_in(path)
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
