"""Commands that use the spool of another user, who decides what is in the folder and may change it at any time."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from rocketmq_spark.base import extras, folders
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.files import OF_OTHERS

# Modules that opening a database imports; RocksDB's own is missing later, with a remedy, if it is not installed.
_LATE = ("pickle", "rocksdict") if extras.installed("rocksdict") else ()


@contextlib.contextmanager
def lent(path: Path) -> Iterator[None]:
    """Use a spool that may belong to another user, who could lead this process to other files. So it must not have links, and
    root has no more rights inside the block than the folder's owner. The block imports only what was imported before, because
    the owner may not be able to read Python's files. Raises ``SpoolError``.
    """
    ways = list(folders.exposures(path))
    if (link := next((way for way in ways if stat.S_ISLNK(way.status.st_mode)), None)) is not None:
        raise SpoolError(
            f"the spool in {path} is not used: the link {link.folder} belongs to {folders.user(link.status.st_uid)}, who may let "
            "it lead elsewhere at any time",
            remedy="Name the folder to which it leads",
        )
    if folders.foreign_inside(path, OF_OTHERS) is None:
        folders.warn_if_replaceable(path, "the spool")
        yield
        return
    if (problem := folders.irregular_in(path, OF_OTHERS)) is not None:
        raise SpoolError(
            f"the spool in {path} is not used: {problem}, so it could lead to files of other users",
            remedy="A spool has only files and folders: remove it, or use a copy of the spool without it",
        )
    with _rights_of_owner(path, ways) if os.geteuid() == folders.ROOT else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _rights_of_owner(path: Path, ways: Sequence[folders.Exposure]) -> Iterator[None]:
    """Give root the rights of the only other user who can change what is in a folder. Raises ``SpoolError`` if there are more."""
    if (shared := next((way for way in ways if way.uid is None and not way.group_only), None)) is not None:
        raise SpoolError(
            f"the spool in {path} is not used: it lies in {shared}",
            remedy=f"Close that folder first: chmod +t {shlex.quote(str(shared.folder))}",
        )
    status = path.stat()
    owners = {way.status.st_uid: way.status for way in ways if way.uid is not None} | {status.st_uid: status}
    owners.pop(folders.ROOT, None)
    if len(owners) > 1:
        raise SpoolError(
            f"the spool in {path} is not used: {' and '.join(map(folders.user, owners))} may change it, and root has the rights "
            "of one only",
            remedy="Give the folder and those above it to one user with chown, or move it",
        )
    for owner in owners.values():
        for module in _LATE:  # the owner may not be able to read the files of Python
            importlib.import_module(module)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(folders.rights_of(owner.st_uid, owner.st_gid))
            except OSError as e:  # a container may lack the capabilities
                raise SpoolError(
                    f"root cannot take the rights of {folders.user(owner.st_uid)}, who owns the spool in {path}: {e.strerror}",
                    remedy="Run the command as that user",
                ) from e
            if not folders.is_readable(path):
                raise SpoolError(
                    f"root uses the spool in {path} with the rights of its owner, {folders.user(owner.st_uid)}, who may not read "
                    "it there",
                    remedy=f"Let its owner read it, or give it to root: chown -R root {shlex.quote(str(path))}",
                )
            yield
            return
    yield  # root's folder, in which others have files
