"""Protection of commands that use the spool of another user. The owner may change anything in the folder at any time."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

from rocketmq_spark.base import extras, folders
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.files import SPOOL_PREFIXES

# Modules that opening a database imports. If RocksDB is not installed, opening raises an error with a remedy.
_LAZY_IMPORTS = ("pickle", "rocksdict") if extras.is_installed("rocksdict") else ()


def sort_own_spools_first(paths: Sequence[Path]) -> list[Path]:
    """Return ``paths`` in an order in which root can open all these spools: its own spools come first, because they need rights
    that ``become_owner`` gives up.
    """
    return sorted(paths, key=_belongs_to_another) if os.geteuid() == folders.ROOT_ID else [*paths]


def _belongs_to_another(path: Path) -> bool:
    with contextlib.suppress(SpoolError):  # ``become_owner`` raises the same error
        return _owner_uid(path) != os.geteuid()
    return False


def become_owner(path: Path) -> None:
    """Allow this process to use a spool that only its owner, this user and root may change.

    RocksDB writes to a folder even when it only reads, and follows links there. Therefore only root and the owner may open a
    spool. Anyone who has the permissions may open a spool of root.

    The owner could place links that lead root to other files. Therefore root takes the rights of the owner. Root keeps these
    rights until the process ends, because files of the spool may stay open. The process must not import modules any more,
    because the owner may not be able to read Python's files.

    Raises ``SpoolError`` if the spool belongs to another user and this user is not root, if others may change the spool, if it
    has links or special files, if root cannot change to the owner, or if root has already changed to another owner.
    """
    # ``_check_exposure`` ensures that no other user can replace this folder before it is opened.
    owner = _owner_uid(path)
    if not folders.has_own_rights() and owner != os.geteuid():
        raise SpoolError(
            f"the spool in {path} is not used: it belongs to {folders.user_text(owner)}, and this command has taken the "
            f"rights of {folders.user_text(os.geteuid())} until it ends, to use the spool of that user",
            remedy=f"Run the command again with that folder: {shlex.quote(str(path))}",
        )
    if folders.error_reader_uid() != folders.ROOT_ID and (foreign_file := folders.foreign_file(path)) is not None:
        raise SpoolError(
            f"the spool in {path} is not used: {foreign_file}, and RocksDB would follow links of that user with the rights of "
            f"{folders.user_text(os.geteuid())}",
            remedy="Run the command as root or as that user",
        )
    _check_exposure(path, owner)
    if os.geteuid() == folders.ROOT_ID != owner:
        _take_rights(owner, path)
    if not folders.has_own_rights() and not folders.is_readable_or_missing(path):
        raise SpoolError(
            f"root uses the spool in {path} with the rights of its owner, {folders.user_text(owner)}, who may not read "
            "it there",
            remedy=f"Let {folders.user_text(owner)} run, not root: chmod u+rwx {shlex.quote(str(path))}. If a folder above "
            "keeps that user out, let its owner open it",
        )
    if (problem := folders.irregularity_in(path, SPOOL_PREFIXES)) is not None:
        raise SpoolError(
            f"the spool in {path} is not used: {problem}, so it could lead to files of other users",
            remedy=f"A spool has only files and folders: let {folders.user_text(owner)} remove it, not root",
        )


def _owner_uid(path: Path) -> int:
    try:
        return folders.owner_uid(path.stat())
    except OSError as e:
        raise SpoolError(
            f"the spool in {path} cannot be opened: {e.strerror}", remedy="Check whether the folder still exists"
        ) from e


def _check_exposure(path: Path, owner: int) -> None:
    exposures_above = folders.exposures(path, owner)
    if folders.error_reader_uid() != folders.ROOT_ID:
        # A folder above the spool only causes a warning, because it may be a volume of Kubernetes with mode 0777, and this user
        # cannot change this mode.
        folders.warn_if_replaceable(path, "the spool")
        exposures_above = (other for other in exposures_above if stat.S_ISLNK(other.status.st_mode))
    exposure_above = next(exposures_above, None)
    exposures_inside = folders.exposures_in(path, SPOOL_PREFIXES, owner)
    if folders.error_reader_uid() != folders.ROOT_ID and owner == folders.ROOT_ID:
        # ``path`` itself may be a volume of Kubernetes whose mode this user cannot change, so the mode only causes a warning.
        folders.warn_if_others_have_rights(path, "whole messages")
        exposures_inside = (exposure for exposure in exposures_inside if exposure.path != path)
    exposure = exposure_above or next(exposures_inside, None)
    if exposure is None:
        return
    raise SpoolError(
        f"the spool in {path} is not used: {exposure.users_text} may change {exposure.path}",
        remedy=folders.remedy(exposure, "the spool", owner, is_above=exposure_above is not None),
    )


def _take_rights(owner: int, path: Path) -> None:
    for module in _LAZY_IMPORTS:
        importlib.import_module(module)
    try:
        folders.become_user(owner)
    except OSError as e:  # a container may lack the capabilities
        raise SpoolError(
            f"root cannot take the rights of {folders.user_text(owner)}, who owns the spool in {path}: {e.strerror}",
            remedy="Run the command as that user",
        ) from e
