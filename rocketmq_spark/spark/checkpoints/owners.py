"""Checks whether other users may change the checkpoint of a query.

The logs of a checkpoint determine what a query reads, skips and writes again. So if another user owns a checkpoint or may write
to it, this user controls each query that starts with the checkpoint. Spark shows the ``checkpointLocation`` to sinks, and not to
sources.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from rocketmq_spark.base import folders, process
from rocketmq_spark.errors import OffsetError
from rocketmq_spark.spark.checkpoints.batch_notes import NOTES_FOLDER
from rocketmq_spark.spark.checkpoints.files import local_path

logger = logging.getLogger(__name__)

_WARNED_CHECKPOINTS_KEY = "checkpoints of others"
# Folders whose files are checked, too. The files of other folders are not checked, because the state may have a million files.
_CHECKED_FOLDERS = ("offsets", "commits", NOTES_FOLDER)


def check_owner(location: str) -> None:
    """Check that no other user may change the checkpoint. If another user may, raise ``OffsetError`` when this process runs as
    root. When this process runs as another user than root, only log one warning, because this user cannot change the mode of
    some folders, such as a volume of Kubernetes.
    """
    if (problem_and_remedy := describe_exposure(location)) is None:
        return
    problem, remedy = problem_and_remedy
    if os.geteuid() == folders.ROOT_ID:
        raise OffsetError(f"root does not use the checkpoint {location}: {problem}", remedy=remedy)
    text = "the checkpoint %s: %s. %s"
    process.get_or_create(
        _WARNED_CHECKPOINTS_KEY, location, functools.partial(logger.warning, text, location, problem, remedy)
    )


def describe_exposure(location: str, owner: int = folders.ROOT_ID) -> tuple[str, str] | None:
    """Return a clause that names another user who may change a local checkpoint, and the remedy; None if there is no such
    user. The user of this process, root and ``owner`` do not count as other users.

    A missing folder is checked, too, because another user may have renamed the folder for only a moment. For a missing folder,
    the function checks whether other users may create it.
    """
    path = local_path(location)
    if path is None:
        return None
    parent_exposure = next(folders.exposures(path, owner), None)
    first_exposure = parent_exposure or next(_exposures_in(path, owner), None)
    if first_exposure is None:
        return None
    problem = (
        f"{first_exposure.users_text} may change {first_exposure.path}, and so decide what the query reads, skips and "
        "writes again"
    )
    new_folder_remedy = "name a new folder, in one that only you and root may change"
    if first_exposure.uid is not None and os.path.realpath(first_exposure.path) == os.path.realpath(path):
        return problem, new_folder_remedy.capitalize()
    if parent_exposure is not None and _is_creatable(first_exposure, path):
        return (
            problem,
            f"Run: mkdir -m 700 {shlex.quote(str(_next_folder_on_path(first_exposure.path, path)))}, or {new_folder_remedy}",
        )
    return (
        problem,
        f"{folders.remedy(first_exposure, 'the checkpoint', owner, parent_exposure is not None)}, or {new_folder_remedy}",
    )


def _exposures_in(path: Path, owner: int) -> Iterator[folders.Exposure]:
    """Yield the exposures of files in a checkpoint, and of the targets of links, because Spark follows links."""
    files = [*_files_to_check(path)]
    yield from folders.exposures_of(path, files, owner)
    for link in filter(Path.is_symlink, files):
        yield from folders.exposures(link, owner)
        yield from folders.exposures_of(link, (), owner)


def _is_creatable(folder_exposure: folders.Exposure, path: Path) -> bool:
    """Whether this user can create the path safely in the exposed folder. This is so if the folder is sticky: in a sticky
    folder, only the user who has created a file may replace the file.
    """
    return (
        folder_exposure.uid is None
        and bool(folder_exposure.status.st_mode & stat.S_ISVTX)
        and path.is_relative_to(folder_exposure.path)
    )


def _next_folder_on_path(folder: Path, path: Path) -> Path:
    return folder / path.relative_to(folder).parts[0]


def owner_of(location: str) -> int:
    """Return the uid of the owner of a checkpoint; the uid of root if the checkpoint is missing or is not on the local file
    system.
    """
    path = local_path(location)
    with contextlib.suppress(OSError):
        return folders.ROOT_ID if path is None else folders.owner_uid(path.stat())
    return folders.ROOT_ID


def _files_to_check(path: Path) -> Iterator[Path]:
    notes = [path / NOTES_FOLDER / name for name in _file_names(path / NOTES_FOLDER)]
    for folder in (path, *(path / name for name in _CHECKED_FOLDERS), *notes):
        yield from (folder / name for name in _file_names(folder))


def _file_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # the folder is missing, or is not readable, so that Spark cannot use it
        return []
