"""Ownership of folders: creates private folders, and finds files that another user owns, may write or may replace.

Root does not count as another user, because root can replace any file anyway. A link counts as a file of another user if that
user owns the link or its target, because the owner of a link chooses its target. A user who may write to a folder can replace
what is in the folder, unless the folder is sticky.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import grp
import itertools
import logging
import os
import pwd
import resource
import secrets
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from rocketmq_spark.base import process, terminal

logger = logging.getLogger(__name__)

ROOT_ID = 0  # of the user root, and of its group
PRIVATE_MODE, READABLE_MODE = 0o700, 0o755
_ACCESS_BITS, _WRITE_BITS = 0o077, 0o022
_OTHERS_BITS, _GROUP_BITS = 0o007, 0o070
_NOBODY_GROUP = 65534  # of nobody
_MAX_LINKS = 40  # as Linux


class ForeignFile(NamedTuple):
    """A file or folder of another user."""

    path: Path
    uid: int

    def __str__(self) -> str:
        return f"{self.path} belongs to {user_text(self.uid)}, and this process runs as {user_text(os.geteuid())}"


def user_text(uid: int) -> str:
    """The number of a user, and the name if there is one."""
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


def home() -> Path:
    """Return HOME; or the home of the account if another user owns HOME, as with ``sudo`` and in containers of CI."""
    try:
        home_folder = Path.home()
    except RuntimeError:  # the user has neither HOME nor an account; in containers, the home of such a user is "/"
        return Path("/")
    if foreign_file(home_folder) is not None:
        with contextlib.suppress(KeyError):  # the user has no account
            return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    return home_folder


def make_folders(path: Path, mode: int = PRIVATE_MODE) -> list[Path]:
    """Create a folder and its missing parents with this mode, and return them, the deepest first."""
    missing_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing_folders):
        folder.mkdir(mode, exist_ok=True)  # another process may be faster
    path.mkdir(mode, exist_ok=True)  # raises if ``path`` is a file
    return missing_folders


def is_readable_or_missing(path: Path) -> bool:
    """Whether this user may list a folder and open what is in it. True also for a missing folder."""
    try:
        with os.scandir(path):
            os.stat(f"{path}/.")
    except PermissionError:
        return False
    except OSError:  # the folder is missing, or is a file: opening it raises the error
        return True
    return True


def foreign_file(path: Path, root_may_own: bool = True) -> ForeignFile | None:
    """Return the file or folder if its owner, or the owner of a link's target, is neither this user nor root.

    Returns None otherwise, also if nothing exists at ``path``. Without ``root_may_own``, root counts as another user.
    """
    trusted_uids = {os.geteuid(), ROOT_ID} if root_may_own else {os.geteuid()}
    for read_status in (path.lstat, path.stat):
        if (status := _status_or_none(read_status)) is not None and (owner := owner_uid(status)) not in trusted_uids:
            return ForeignFile(path, owner)
    return None


def foreign_file_in(
    path: Path, skipped_prefixes: tuple[str, ...] = (), root_may_own: bool = True
) -> ForeignFile | None:
    """Return what ``foreign_file`` finds first for a folder, or for a file or folder below it. Links to folders are
    not followed.

    Args:
        path: The folder, which may be missing.
        skipped_prefixes: Subfolders whose names have one of these prefixes are left out.
        root_may_own: Whether root may own ``path`` itself.
    """
    if (first_foreign_file := foreign_file(path, root_may_own)) is not None:
        return first_foreign_file
    for entry in _entries(path, skipped_prefixes):
        if (status := _status_or_none(entry.lstat)) is not None and (owner := owner_uid(status)) not in (
            os.geteuid(),
            ROOT_ID,
        ):
            return ForeignFile(entry, owner)
    return None


def irregularity_in(path: Path, skipped_prefixes: tuple[str, ...] = ()) -> str | None:
    """Return a clause about the first entry that is neither a folder nor a file with only one name (hard link); None if there
    is no such entry.
    """
    for entry in _entries(path, skipped_prefixes):
        with contextlib.suppress(FileNotFoundError):  # another process removes files meanwhile
            if (problem := irregularity(entry)) is not None:
                return problem
    return None


def irregularity(path: Path) -> str | None:
    """Return a clause about a path that is neither a folder nor a file with only one name (hard link); None for other paths."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return f"{path} is neither a file nor a folder"
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        return f"{path} has another name, perhaps in another folder"
    return None


def link_in(path: Path) -> Path | None:
    """Return the first link that is in a folder, or in a folder below it; None if there is no link."""
    return next((entry for entry in _entries(path, ()) if entry.is_symlink()), None)


def subfolders(path: Path) -> Iterator[Path]:
    """Yield the folders below a folder, at every depth, and links to folders. Links are not followed."""
    for folder, folders, _ in os.walk(path):
        yield from (Path(folder, name) for name in folders)


def _entries(path: Path, skipped_prefixes: tuple[str, ...]) -> Iterator[Path]:
    for folder, folders, files in os.walk(path):
        folders[:] = (
            [name for name in folders if not name.startswith(skipped_prefixes)] if skipped_prefixes else folders
        )
        yield from (Path(folder, name) for name in (*folders, *files))


_MOUNTS = Path("/proc/self/mountinfo")


def owner_uid(status: os.stat_result) -> int:
    """The uid of the owner of a file.

    If a user other than root mounted the file system (FUSE), that user counts as the owner of each file, because the user's
    program decides which owners the file system shows.
    """
    if os.major(status.st_dev):  # a disk
        return status.st_uid
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    try:
        lines = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:  # not Linux
        return status.st_uid
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        if mount.split(" ")[2] == device and file_system.startswith("fuse"):
            options = dict(option.partition("=")[::2] for option in file_system.split(" ")[-1].split(","))
            return int(options.get("user_id", ROOT_ID)) or status.st_uid
    return status.st_uid


def _status_or_none(read_status: Callable[[], os.stat_result]) -> os.stat_result | None:
    # Another process may remove the file meanwhile. If the status of a file cannot be read, the caller ignores the file.
    with contextlib.suppress(OSError):
        return read_status()
    return None


def open_regular(
    path: Path | str, flags: int = os.O_RDONLY, folder_descriptor: int | None = None, mode: int = 0o600
) -> int:
    """Open a file and return its descriptor. Raises ``OSError`` for a link, which would lead elsewhere, and for a pipe or device,
    which could make this process wait for ever.

    Args:
        path: The file; relative to the folder of ``folder_descriptor`` if that is given.
        flags: Flags of ``os.open``.
        folder_descriptor: An open folder.
        mode: Mode of a new file, before the umask removes rights.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder_descriptor)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise OSError(e.errno, "it is a link", str(path)) from e
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return descriptor


def open_private(path: Path, flags: int) -> int:
    """Open, like ``open_regular``, a file that only this user may use, such as a lock. Takes all rights to the file from other
    users.

    Raises ``PermissionError`` for a file of another user.
    """
    descriptor = open_lock(path, flags)
    if (owner := owner_uid(os.fstat(descriptor))) != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"it belongs to {user_text(owner)}", str(path))
    return descriptor


def open_lock(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a file that processes lock, like ``open_regular``. If the file belongs to this user, takes all rights to the file
    from other users, who could otherwise lock the file, and so exclude its owner.
    """
    descriptor = open_regular(path, flags)
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & _ACCESS_BITS:
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(descriptor, 0o600)
    return descriptor


@contextlib.contextmanager
def open_subfolder(top: Path | int, names: Iterable[str] = (), mode: int | None = None) -> Iterator[int]:
    """Open a subfolder of ``top`` part by part, and yield its descriptor until the end of the block.

    Raises ``OSError`` if a part below ``top`` is a link. So what is done through the descriptor stays in ``top``, even if
    another user replaces folders meanwhile.

    Args:
        top: A folder, or its descriptor.
        names: The names of the subfolders.
        mode: The mode of missing subfolders, which are created; None if a missing subfolder is an error.
    """
    descriptor = os.open(top, _FOLDER_FLAGS) if isinstance(top, Path) else os.dup(top)
    try:
        for name in names:
            if mode is not None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, mode, dir_fd=descriptor)
            next_descriptor = open_folder(name, descriptor)
            os.close(descriptor)
            descriptor = next_descriptor
        yield descriptor
    finally:
        os.close(descriptor)


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_folder(name: str, folder_descriptor: int) -> int:
    """Open the folder ``name`` in an open folder, and return its descriptor. Raises ``OSError`` for a link."""
    if name in ("", ".", "..") or "/" in name:
        raise OSError(errno.EINVAL, "it is no name of a folder", name)
    try:
        return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder_descriptor)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(os.lstat(name, dir_fd=folder_descriptor).st_mode):
            raise OSError(errno.ELOOP, "it is a link", name) from e
        raise


def make_folder_for(owner_status: os.stat_result, name: str, folder_descriptor: int) -> int:
    """Create a private folder in an open folder, and return the descriptor of the new folder, which belongs to the user and
    group in ``owner_status``. Only root can do this, and only in a folder of root, where no other user can replace the new
    folder before its owner changes.

    Raises ``PermissionError`` otherwise.
    """
    parent_status = os.fstat(folder_descriptor)
    if os.geteuid() != ROOT_ID or parent_status.st_uid != ROOT_ID or others_may_write(parent_status):
        raise PermissionError(errno.EACCES, f"{user_text(owner_status.st_uid)} may not create this folder", name)
    os.mkdir(name, PRIVATE_MODE, dir_fd=folder_descriptor)
    descriptor = open_folder(name, folder_descriptor)
    os.fchown(descriptor, owner_status.st_uid, owner_status.st_gid)
    return descriptor


class TemporaryFolder(NamedTuple):
    """A private temporary folder, and the user to whom it belongs."""

    path: Path
    uid: int


def make_temporary_folder(owner: int, prefix: str) -> TemporaryFolder:
    """Create a private folder in the temporary folder. It belongs to the user ``owner`` if root calls this with ``CAP_CHOWN``,
    otherwise to this user. Call this only if ``temporary_folder_exposure`` returns None.

    Raises ``PermissionError`` if another folder has taken its name.
    """
    temporary_folder, name = Path(tempfile.gettempdir()).absolute(), f"{prefix}{secrets.token_hex(8)}"
    uid = os.geteuid()
    with open_subfolder(temporary_folder) as folder_descriptor:
        os.mkdir(name, PRIVATE_MODE, dir_fd=folder_descriptor)
        descriptor = open_folder(name, folder_descriptor)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != uid or stat.S_IMODE(status.st_mode) & _ACCESS_BITS:
                raise PermissionError(errno.EPERM, "another folder has its name", str(temporary_folder / name))
            if uid == ROOT_ID != owner:
                with contextlib.suppress(OSError):
                    os.fchown(descriptor, owner, -1)
                    uid = owner
        finally:
            os.close(descriptor)
    return TemporaryFolder(temporary_folder / name, uid)


def temporary_folder_exposure() -> Exposure | None:
    """Return what lets other users replace a new folder in the temporary folder; None if no other user may replace
    such a folder.
    """
    temporary_folder = Path(tempfile.gettempdir())
    if (exposure := next(exposures(temporary_folder), None)) is not None:
        return exposure
    status = temporary_folder.stat()
    if others_may_write(status) and not status.st_mode & stat.S_ISVTX:
        return Exposure(temporary_folder, status, None)
    return None


def try_lock(file: int | IO[str]) -> bool:
    """Lock an open file without waiting. Returns False if the file is locked through another descriptor, of this or another
    process.

    The lock ends when a process unlocks the file, or when all processes that inherited the open file have closed it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_to_append(path: Path) -> int:
    """Open or create a file that is appended to, and return its descriptor. If other users may replace the file, as in a folder
    for all users, raises ``OSError`` for a link, a pipe or a device.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    if any(exposures(path)):
        return open_regular(path, flags, mode=0o666)
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


def read_regular(path: Path) -> bytes:
    """Return the content of a file, which is opened as by ``open_regular``."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def copy_regular(path: Path, target: Path) -> None:
    """Copy the content of a file, which is opened as by ``open_regular``, to a new file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(open_regular(path), "rb") as file, open(open_regular(target, flags), "wb") as copy:
        shutil.copyfileobj(file, copy)


def replace_file(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replace a file by a new one. A link of this name is not followed, and no process reads an incomplete file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.write(content.encode() if isinstance(content, str) else content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def others_may_write(status: os.stat_result) -> bool:
    """Whether the mode of a file or folder lets users other than its owner and this user write to it."""
    return bool(_rights_of_others(status, _WRITE_BITS))


def is_shared_folder(status: os.stat_result) -> bool:
    """Whether a folder is for all users, like ``/tmp``: it is sticky, and other users may write to it. The mode of such a
    folder must not be changed.
    """
    return others_may_write(status) and bool(status.st_mode & stat.S_ISVTX)


def _rights_of_others(status: os.stat_result, rights: int) -> int:
    """Return those of the ``rights`` that the mode grants to other users than the owner and this user."""
    granted_rights = status.st_mode & rights
    users = {status.st_uid, os.geteuid()}
    return (
        granted_rights & _OTHERS_BITS
        if granted_rights & _GROUP_BITS and any(_is_private_group(status.st_gid, uid) for uid in users)
        else granted_rights
    )


def creation_mask() -> int:
    """The umask of this process."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    umask = os.umask(0o077)  # on other systems than Linux, a process can read its umask only by changing the umask
    os.umask(umask)
    return umask


def others_may_write_new_files() -> bool:
    """Whether the umask lets users other than this user and root write to new files, and connect to new sockets."""
    write_rights = _WRITE_BITS & ~creation_mask()
    return bool(write_rights & _OTHERS_BITS or (write_rights and not _is_private_group(os.getegid(), os.geteuid())))


def _is_private_group(gid: int, uid: int) -> bool:
    """Whether a group certainly has no other members than the user ``uid`` and root, and is the primary group of no other
    account. A file may belong to a group of which the file's owner is not a member.
    """
    if gid == ROOT_ID:  # this is root's group; in images for OpenShift, the container's user is a member, too
        return True
    if not uids_by_primary_group().get(gid, set()) <= {uid, ROOT_ID}:
        return False
    try:
        group = grp.getgrgid(gid)
    # The group has no name: on volumes of Kubernetes (``fsGroup``), and in containers with random gids.
    except KeyError:
        return gid in (os.getegid(), *os.getgroups())
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return False
    return (
        gid == account.pw_gid
        and (group.gr_name == account.pw_name or gid == uid)
        and {*group.gr_mem} <= {account.pw_name}
    )


@functools.cache  # a directory service may have very many accounts
def uids_by_primary_group() -> dict[int, set[int]]:
    """The uids of accounts, by the gid of their primary group. ``gr_mem`` of a group does not include these accounts."""
    uids: dict[int, set[int]] = {}
    for account in pwd.getpwall():
        uids.setdefault(account.pw_gid, set()).add(account.pw_uid)
    return uids


def is_writable_by_owner_only(path: Path) -> bool:
    """Whether a file or folder exists, this user or root owns it, and its mode lets only the owner write to it.

    The mode must not let a group write, even if only the owner is in the group.
    """
    try:
        return foreign_file(path) is None and not path.stat().st_mode & _WRITE_BITS
    except OSError:
        return False


def set_mode(path: Path, mode: int) -> None:
    """Change the mode of a file, which is opened as by ``open_regular``."""
    descriptor = open_regular(path)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def revoke_write(path: Path) -> bool:
    """Revoke the right of other users to write to ``path``. Returns False if other users keep this right. Raises ``OSError`` if
    nothing exists at ``path``.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:  # this user may not read it
        return not others_may_write(path.stat())
    try:
        return _revoke_write(descriptor)
    finally:
        os.close(descriptor)


def _revoke_write(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    if status.st_mode & _WRITE_BITS and status.st_uid == os.geteuid():
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~_WRITE_BITS)
    return not others_may_write(os.fstat(descriptor))


def revoke_write_all(path: Path) -> None:
    """Take from other users the right to write to a file, or to a folder and what is in it.

    Folders come first, from the top down, so that other users can no longer add or replace entries. After this call, check which
    files other users own or may still write. Links below ``path`` are not followed.
    """
    if path.is_dir():
        with open_subfolder(path) as folder_descriptor:
            _revoke_write_in(folder_descriptor)
    elif path.exists():
        revoke_write(path)


def _revoke_write_in(folder_descriptor: int) -> None:
    _revoke_write(folder_descriptor)
    for name in os.listdir(folder_descriptor):
        with contextlib.suppress(OSError):  # the entry is gone; or it cannot be opened, and stays as it is
            mode = os.lstat(name, dir_fd=folder_descriptor).st_mode
            if stat.S_ISDIR(mode):
                with open_subfolder(folder_descriptor, [name]) as inner_descriptor:
                    _revoke_write_in(inner_descriptor)
            elif stat.S_ISREG(mode) and mode & _WRITE_BITS:
                descriptor = open_regular(name, folder_descriptor=folder_descriptor)
                try:
                    _revoke_write(descriptor)
                finally:
                    os.close(descriptor)


class Exposure(NamedTuple):
    """A file or folder that other users may change or replace: the owner ``uid``, or if ``uid`` is None, all users with write
    permission.
    """

    path: Path
    status: os.stat_result
    uid: int | None

    @property
    def users_text(self) -> str:
        if self.uid is not None:
            return f"its owner, {user_text(self.uid)},"
        mode = stat.S_IMODE(self.status.st_mode)
        return (
            f"{'others' if mode & _WRITE_BITS & _OTHERS_BITS else f'the group {self.status.st_gid}'} (mode {mode:04o})"
        )

    def __str__(self) -> str:
        return f"{self.path}, in which {self.users_text} may replace files and folders"


def exposures(path: Path, owner: int = ROOT_ID) -> Iterator[Exposure]:
    """Yield what lets other users replace ``path``: folders above it whose entries others may replace, and parts of the path that
    others own. Links in the path are followed. Other users are all but this user, root and ``owner``.

    Each part is checked before its link is read. So if this yields nothing, no other user can have changed a link during the
    check.
    """
    trusted_uids = {os.geteuid(), ROOT_ID, owner} | _unmapped_uids()
    for folder, entry in _lookups(path):
        folder_status, entry_status = _status_or_none(folder.stat), _status_or_none(entry.lstat)
        if folder_status is None:  # nothing is opened through a folder that is missing or cannot be read
            continue
        if others_may_write(folder_status) and (entry_status is None or not folder_status.st_mode & stat.S_ISVTX):
            yield Exposure(folder, folder_status, None)
        if entry_status is not None and (uid := owner_uid(entry_status)) not in trusted_uids:
            yield Exposure(entry, entry_status, uid)


def remedy(exposure: Exposure, name: str, owner: int, is_above: bool = True) -> str:
    """Return a sentence, without its period, that says how to remove an exposure. ``name`` is what is exposed, such as "the
    spool", and belongs to ``owner``. ``is_above`` says whether the exposed folder is above ``name``.

    If another user may lead the path elsewhere before root runs a command, the sentence gives root no command, not even ``mv``.
    """
    quoted_path = shlex.quote(str(exposure.path))
    if exposure.uid is None:
        folder_owner = exposure.status.st_uid
        if folder_owner != error_reader_uid():
            return f"Let {user_text(folder_owner)} run, not root: chmod go-w {quoted_path}"
        if next(exposures(exposure.path), None) is None:
            return f"Run: chmod go-w {quoted_path}"
    if exposure.uid is not None and not is_above:
        return f"Let {user_text(exposure.uid)} remove {quoted_path}, not root"
    if owner == ROOT_ID:
        return f"Use a folder for {name} that only root may change, in folders that only root may change"
    if owner == error_reader_uid():
        return f"Move {name} below a folder that only you and root may change"
    return f"Let {user_text(owner)} move {name}, not root, below a folder that only that user and root may change"


def exposures_in(path: Path, skipped_prefixes: tuple[str, ...], owner: int) -> Iterator[Exposure]:
    """Yield the folder, and each entry in it, if users other than ``owner``, this user and root may change it."""
    yield from exposures_of(path, _entries(path, skipped_prefixes), owner)


def exposures_of(path: Path, entries: Iterable[Path], owner: int = ROOT_ID) -> Iterator[Exposure]:
    """Yield the folder, and each of ``entries``, if users other than ``owner``, this user and root may change it. For a link,
    only its owner is checked.
    """
    for entry in itertools.chain((path,), entries):
        status = _status_or_none(path.stat if entry == path else entry.lstat)
        if status is not None and (uid := owner_uid(status)) not in (os.geteuid(), ROOT_ID, owner):
            yield Exposure(entry, status, uid)
        elif status is not None and not stat.S_ISLNK(status.st_mode) and others_may_write(status):
            yield Exposure(entry, status, None)


def _lookups(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each folder in which the system looks up a part of the path, with that part. Links in the path are followed."""
    folder, parts, link_count, visited_links = Path("/"), list(reversed(path.absolute().parts[1:])), 0, set()
    yield folder, folder
    while parts:
        if (part := parts.pop()) == "..":
            folder = folder.parent
            continue
        entry = folder / part
        if entry not in visited_links:
            visited_links.add(entry)
            yield folder, entry
        try:
            target = Path(os.readlink(entry))
        except OSError:  # no link
            folder = entry
            continue
        if (link_count := link_count + 1) > _MAX_LINKS:
            return
        parts += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        folder = Path("/") if target.is_absolute() else folder


def _unmapped_uids() -> set[int]:
    """The uid that stands for all users whom the user namespace of a container does not have, such as the root of its host."""
    try:
        lines = Path("/proc/self/uid_map").read_text("ascii").splitlines()
        overflow_uid = int(Path("/proc/sys/kernel/overflowuid").read_text("ascii"))
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    except (OSError, ValueError):  # not Linux
        return set()
    return set() if any(first <= overflow_uid < first + count for first, count in ranges) else {overflow_uid}


def warn_if_others_have_rights(path: Path, content_name: str) -> None:
    """Log once in a process if the mode of a folder lets other users read or write its files."""
    status = path.stat()
    rights_of_others = _rights_of_others(status, _ACCESS_BITS)
    if rights_of_others:
        verb = "write" if rights_of_others & _WRITE_BITS else "read"
        is_own = status.st_uid == os.geteuid()
        advice = f"protect it with: chmod 700 {shlex.quote(str(path))}" if is_own else "name a new folder in it"
        text = "the folder %s keeps its mode, with which other users may %s %s; %s"
        process.get_or_create("open folders", path, lambda: logger.warning(text, path, verb, content_name, advice))


def warn_if_replaceable(path: Path, shown_name: str) -> None:
    """Log once in a process for each folder above ``path`` that lets other users replace ``path``. ``shown_name`` is the name of
    the path in the warning, such as "the spool".
    """
    text = "%s lies in %s; let the owner of the folder run chmod go-w or 1777, or name another folder"
    for exposure in exposures(path):
        process.get_or_create(
            "replaceable folders", exposure.path, functools.partial(logger.warning, text, shown_name, exposure)
        )


# Has the uid that ``as_user`` or ``become_user`` set; empty while this process has its own rights.
_borrowed_uids: list[int] = []


def has_own_rights() -> bool:
    """Whether this process has the rights that it started with: it is not in a block of ``as_user``, and never called
    ``become_user``.
    """
    return not _borrowed_uids


def error_reader_uid() -> int:
    """The uid of the user who reads the errors of this process. This is the uid of root also while root has the rights of
    another user.
    """
    return os.geteuid() if has_own_rights() else ROOT_ID


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Run with the rights of another user and of that user's groups inside the block, in all threads. Only root can do this.

    If files stay open after the block, root's rights apply to them again; use ``become_user`` for such files.

    Args:
        uid: The other user, to whom new files belong. A user without an account gets only the group of nobody.
    """
    gid, groups = groups_of(uid)
    with contextlib.ExitStack() as stack:  # the user is set last and restored first: only root may set groups
        stack.callback(os.setgroups, os.getgroups())
        os.setgroups(groups)
        stack.callback(os.setegid, os.getegid())
        os.setegid(gid)
        stack.callback(os.seteuid, os.geteuid())
        os.seteuid(uid)
        stack.callback(_borrowed_uids.pop)
        _borrowed_uids.append(uid)
        yield


def become_user(uid: int) -> None:
    """Run as another user, with that user's groups, for the rest of this process and in all threads. Only root can do this. The
    real, effective and saved ids change, so that nothing can get root's rights back. ``uid`` is as in ``as_user``.

    Links of that user must not lead to files that only root can reach. So the process gives up its terminal and its current
    folder, because ``/dev/tty`` opens the terminal, and ``/proc/self/cwd`` opens the current folder, whatever the modes of the
    folders above it are. Use absolute paths afterwards.

    Raises ``OSError`` if root lacks the capability; then this process keeps root's rights.
    """
    gid, groups = groups_of(uid)
    protect_memory = forbid_core_dumps()
    terminal.detach()
    os.chdir("/")
    previous_ids = os.getgroups(), (os.getgid(), os.getegid())
    _borrowed_uids.append(uid)  # before the change, because Ctrl-C may come at any point
    try:
        os.setgroups(groups)
        os.setregid(gid, gid)
        os.setreuid(uid, uid)  # sets the saved uid, too, because macOS has no ``setresuid``
    except OSError:
        _borrowed_uids.remove(uid)
        os.setregid(*previous_ids[1])
        os.setgroups(previous_ids[0])
        raise
    protect_memory()


_PR_SET_DUMPABLE = 4  # of ``prctl``


def forbid_core_dumps() -> Callable[[], None]:
    """Forbid core dumps of this process, and return a function that protects the memory of this process from other processes of
    its user. Call the returned function after the change of the user, because the change ends this protection. The returned
    function imports nothing.

    A core dump has the secrets that root read, and a program that collects dumps may give them to the user of the process.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux
        return lambda: None
    return lambda: prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def groups_of(uid: int) -> tuple[int, list[int]]:
    """The group of a user, and all groups. The group of a folder does not prove that its owner is a member, because new folders
    inherit the group of a parent with the setgid bit.
    """
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return _NOBODY_GROUP, [_NOBODY_GROUP]
    return account.pw_gid, os.getgrouplist(account.pw_name, account.pw_gid)
