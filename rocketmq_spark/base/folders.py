"""Who owns a folder: creates folders for this user alone, and finds what another user owns or may write.

Root counts as a friend, because root can replace any file anyway. A link counts with its own owner and that of its target: who
owns a link decides where it leads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.base import process

logger = logging.getLogger(__name__)

ROOT = 0
PRIVATE = 0o700
_READ_OR_WRITE, _WRITE = 0o077, 0o022


class Foreign(NamedTuple):
    """A file or folder of another user."""

    path: Path
    uid: int

    def __str__(self) -> str:
        return f"{self.path} belongs to {user(self.uid)}, and this process runs as {user(os.geteuid())}"


def user(uid: int) -> str:
    """The number of a user, and the name if there is one."""
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


def make(path: Path) -> list[Path]:
    """Create a folder and its missing parents with mode 0700, and return them, the deepest first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(PRIVATE, exist_ok=True)  # another process may be faster
    path.mkdir(PRIVATE, exist_ok=True)  # raises if it is a file
    return missing


def is_readable(path: Path) -> bool:
    """Whether this user may list a folder and open what is in it."""
    try:
        with os.scandir(path):
            os.stat(f"{path}/.")
    except PermissionError:
        return False
    except OSError:  # it has gone, or is none
        return True
    return True


def foreign(path: Path, root_may: bool = True) -> Foreign | None:
    """The file or folder, or what it links to, if another user than this one or root owns it; None also if there is nothing."""
    owners = {os.geteuid(), ROOT} if root_may else {os.geteuid()}
    for read in (path.lstat, path.stat):
        if (uid := _uid(read)) is not None and uid not in owners:
            return Foreign(path, uid)
    return None


def foreign_in(path: Path, but: tuple[str, ...] = (), root_may: bool = True) -> Foreign | None:
    """As ``foreign``, also for everything in the folder.

    Args:
        path: A folder, which may be missing.
        but: Prefixes of the names of subfolders that do not count.
        root_may: Whether root may own ``path`` itself.
    """
    if (found := foreign(path, root_may)) is not None:
        return found
    for folder, folders, files in os.walk(path):
        folders[:] = _counted(folders, but)
        for entry in (Path(folder, name) for name in (*folders, *files)):
            if (uid := _uid(entry.lstat)) is not None and uid not in (os.geteuid(), ROOT):
                return Foreign(entry, uid)
    return None


def _counted(folders: Sequence[str], but: tuple[str, ...]) -> list[str]:
    return [name for name in folders if not name.startswith(but)] if but else list(folders)


def _uid(read: Callable[[], os.stat_result]) -> int | None:
    with contextlib.suppress(
        OSError
    ):  # another process may remove files meanwhile; what cannot be read is not used either
        return read().st_uid
    return None


def only_own(path: Path) -> bool:
    """Whether a file or folder is there, this user or root owns it, and no other user may write to it."""
    try:
        return foreign(path) is None and not path.stat().st_mode & _WRITE
    except OSError:
        return False


def close(path: Path) -> bool:
    """Take the right to write from other users. Returns False if they keep it. Raises ``OSError`` if nothing is there."""
    status = path.stat()
    if not status.st_mode & _WRITE:
        return True
    if status.st_uid != os.geteuid():
        return False
    try:
        path.chmod(stat.S_IMODE(status.st_mode) & ~_WRITE)
    except OSError:
        return False
    return True


def warn_if_open(path: Path, content: str) -> None:
    """Log once in a process if other users may read or write the files of a folder by its mode."""
    mode = path.stat().st_mode
    if mode & _READ_OR_WRITE:
        others = "write" if mode & _WRITE else "read"
        text = "the folder %s keeps its mode, with which other users may %s %s; protect it with: chmod 700 %s"
        process.once("open folders", path, lambda: logger.warning(text, path, others, content, path))


def warn_if_replaceable(path: Path, option: str) -> None:
    """Log once in a process if others may replace the folders in ``path``: its owner, or all who may write there."""
    status = path.stat()
    shared = status.st_mode & _WRITE and not status.st_mode & stat.S_ISVTX
    others = f"others (mode {stat.S_IMODE(status.st_mode):04o})" if shared else None
    if status.st_uid not in (os.geteuid(), ROOT):
        others = f"its owner, uid {status.st_uid},"
    if others is not None:
        text = "option %r is %s, in which %s may replace the folders of this user; protect it with chown and chmod 1777"
        process.once("replaceable folders", path, lambda: logger.warning(text, option, path, others))


@contextlib.contextmanager
def owner_kept(path: Path, but: tuple[str, ...] = ()) -> Iterator[None]:
    """Give files that root makes in a folder inside the block to the folder's owner. Does nothing for other users: they cannot.

    ``but`` is as for ``foreign``. A file with a second name is left alone: the owner may have linked one of root's there.
    """
    if os.geteuid() != ROOT:
        yield
        return
    before = {_identity(status) for _, status in _opened(path, but) if status.st_uid == ROOT}
    try:
        yield
    finally:
        owner = path.stat() if path.exists() else None
        for opened, status in _opened(path, but):
            single = status.st_nlink == 1 or stat.S_ISDIR(status.st_mode)
            if owner is not None and status.st_uid == ROOT and single and _identity(status) not in before:
                os.fchown(opened, owner.st_uid, owner.st_gid)


def _opened(path: Path, but: tuple[str, ...]) -> Iterator[tuple[int, os.stat_result]]:
    """Opens one entry after the other. By descriptor, because the owner of the folder may exchange entries at any time."""
    for _, folders, files, there in os.fwalk(path.resolve()):
        folders[:] = _counted(folders, but)
        for name in (*folders, *files):
            with contextlib.suppress(OSError):  # a link, or an entry that has gone
                opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=there)
                try:
                    yield opened, os.fstat(opened)
                finally:
                    os.close(opened)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
