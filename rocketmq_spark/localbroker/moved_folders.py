"""Finds folders that other users may have moved to names under which ``LocalBroker`` deletes and replaces files.

A user who may write to a folder can rename each entry in it, even a folder that only its owner may change. So if others may
write to a data folder or a cache, and it has entries with such names, ``LocalBroker`` rejects the folder. The owner must check
these entries first.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from rocketmq_spark.base import folders

_REMEDY = "; LocalBroker deletes and replaces files there, so check first that all of them are files of LocalBroker"


def revoke_write_if_safe(
    folder: Path,
    check_entries: Callable[[bool], str | None],
    revoke_write_of_entries: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Check a folder, revoke the right of others to write to the folder, and check the folder again, because others could change
    it during the first check. Returns None if these steps succeed. If a step fails, the folder keeps its old mode, and the result
    is a clause about the problem.

    Args:
        folder: The folder.
        check_entries: Checks the entries, and returns a clause about a problem. Its argument is whether others could write to the
            folder before this call.
        revoke_write_of_entries: Called when others can no longer write to the folder. Revokes the right of others to write to the
            entries, checks the entries, and returns a clause about a problem.
    """
    old_status = folder.stat()
    others_could_write = folders.others_may_write(old_status)
    if (problem := check_entries(others_could_write)) is not None:
        return problem
    if not folders.revoke_write(folder):
        return f"others may write to {folder}"
    problem = check_entries(others_could_write) or revoke_write_of_entries()
    if problem is not None:
        with contextlib.suppress(OSError):  # the folder is gone, or belongs to root, whose folders keep their mode
            _restore_mode(folder, old_status)
    return problem


def _restore_mode(folder: Path, old_status: os.stat_result) -> None:
    with folders.open_subfolder(folder) as descriptor:
        new_status = os.fstat(descriptor)
        if (
            os.path.samestat(new_status, old_status) and new_status.st_mode != old_status.st_mode
        ):  # the statuses differ if another folder has taken the name
            os.fchmod(descriptor, stat.S_IMODE(old_status.st_mode))


def moved_folder_problem(entry: Path, others_could_write: bool, inner_folders: Iterable[Path] = ()) -> str | None:
    """Return a clause that says that others may have moved a folder to ``entry``; None if this is impossible.

    Args:
        entry: An existing file or folder with a name under which ``LocalBroker`` deletes files.
        others_could_write: Whether others could write to the folder above.
        inner_folders: Folders in ``entry``. Others must not be able to write to these folders either. Links among these folders
            are not checked.
    """
    if others_could_write:
        return f"others may write to it, and may have moved a folder of yours to {entry}{_REMEDY}"
    if _others_may_write(entry.stat):
        return f"others may write to {entry}, and may have moved a folder of yours there{_REMEDY}"
    for folder in inner_folders:
        if not folder.is_symlink() and _others_may_write(folder.lstat):
            return f"others may write to {folder}, and may have moved a folder of yours there{_REMEDY}"
    return None


def _others_may_write(read_status: Callable[[], os.stat_result]) -> bool:
    with contextlib.suppress(OSError):  # a download removes its folder when it ends
        return folders.others_may_write(read_status())
    return False
