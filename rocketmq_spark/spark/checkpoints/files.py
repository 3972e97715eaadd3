"""Reads and writes the files of a checkpoint, which is local or at ``s3://``, ``hdfs://``, ``gs://`` or ``abfs://``.

Failures are an ``OffsetError`` that names the folder. Errors contain no text of files, because ``lag --serve`` shows errors to
strangers.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rocketmq_spark.base import folders
from rocketmq_spark.errors import OffsetError, OptionError
from rocketmq_spark.options.paths import length_problem, shortened


class _FileEntry(NamedTuple):
    """A file or folder in a checkpoint. ``path`` is relative to the checkpoint."""

    path: str
    is_file: bool
    is_folder: bool
    changed_ms: int


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a local or remote file system. ``name`` is as the user wrote it; paths of files are relative to the folder."""

    name: str
    _file_system: Any
    _root_path: str

    def files(self, subfolder: str = "", recursive: bool = False) -> dict[str, int]:
        """Return when each file was last changed, in ms since 1970; empty if the folder does not exist.

        Raises ``OffsetError`` for links on a local disk.
        """
        return {entry.path: entry.changed_ms for entry in self._entries(subfolder, recursive) if entry.is_file}

    def folders(self, subfolder: str) -> list[str]:
        """Return the names of the subfolders of a folder; empty if the folder does not exist.

        Raises ``OffsetError`` for links on a local disk.
        """
        return [_base_name(entry.path) for entry in self._entries(subfolder, False) if entry.is_folder]

    def _entries(self, subfolder: str, recursive: bool) -> list[_FileEntry]:
        from pyarrow.fs import FileSelector

        with self._errors_with_folder_name():
            if self._is_local:
                return self._local_entries(subfolder, recursive)
            selector = FileSelector(self._full_path(subfolder), allow_not_found=True, recursive=recursive)
            return [self._entry(info) for info in self._file_system.get_file_info(selector)]

    def _entry(self, info: Any) -> _FileEntry:
        from pyarrow.fs import FileType

        path = info.path[len(self._root_path) :].lstrip("/")
        changed_ms = (info.mtime_ns or 0) // 1_000_000
        return _FileEntry(path, info.type == FileType.File, info.type == FileType.Directory, changed_ms)

    def _local_entries(self, subfolder: str, recursive: bool) -> list[_FileEntry]:
        entries: list[_FileEntry] = []
        with self._reject_links(subfolder):
            try:
                with self._open_folder(subfolder) as folder_descriptor, os.scandir(folder_descriptor) as dir_entries:
                    for entry in dir_entries:
                        with suppress(FileNotFoundError):  # another process may remove the file meanwhile
                            entries.append(_local_entry(f"{subfolder}/{entry.name}".lstrip("/"), entry))
            except FileNotFoundError:
                return []
        if recursive:
            for subfolder in [entry.path for entry in entries if entry.is_folder]:
                entries += self._local_entries(subfolder, recursive)
        return entries

    def exists(self, subfolder: str = "") -> bool:
        """Whether the folder exists; with ``subfolder``, whether this subfolder exists. Raises ``OffsetError`` for links on a
        local disk.
        """
        from pyarrow.fs import FileType

        with self._errors_with_folder_name():
            if not self._is_local:
                return bool(self._file_system.get_file_info(self._full_path(subfolder)).type == FileType.Directory)
            with (
                self._reject_links(subfolder),
                suppress(FileNotFoundError, NotADirectoryError),
                self._open_folder(subfolder),
            ):
                return True
            return False

    def _open_folder(self, subfolder: str) -> AbstractContextManager[int]:
        return folders.open_subfolder(Path(self._root_path), subfolder.split("/") if subfolder else [])

    @contextmanager
    def _reject_links(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if e.errno != errno.ELOOP:
                raise
            raise OffsetError(
                f"{self.name}/{path} is not read: {e.filename} is a link, which could lead to files of other users",
                remedy=self._remedy_of_link(),
            ) from e

    def advice_to_owner(self, action: str) -> str:
        """Return the advice to do ``action``. If another user owns a local folder, the advice is to let this owner do it, and
        not root. If root did it, the owner could make root change other files.
        """
        with suppress(OSError):
            if self._is_local and (owner := folders.owner_uid(os.stat(self._root_path))) != folders.error_reader_uid():
                return f"let {folders.user_text(owner)} {action}, not root"
        return action

    def _remedy_of_link(self) -> str:
        advice = self.advice_to_owner("replace the link by the folder or file to which it leads")
        return advice[0].upper() + advice[1:]

    def read(self, path: str) -> str:
        """Return the text of a file. Errors contain no part of the text, because the path may lead to another file than the user
        of the command expects.
        """
        try:
            return str(self._read_content(path), "utf-8")
        except UnicodeDecodeError:
            raise OffsetError(f"{self.name}/{path} is damaged: it is not UTF-8 text", remedy=RESTORE_FILE) from None

    def read_bytes(self, path: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        try:
            return self._read_content(path)
        except OffsetError as e:
            if isinstance(e.__cause__, FileNotFoundError):
                return None
            raise

    def _read_content(self, path: str) -> bytes:
        """Read a file. Raises ``OffsetError`` for a file of more than ``_MAX_FILE_BYTES``, and on a local disk for links, pipes
        and devices, because another user may have put them into the folder.
        """
        with self._errors_with_folder_name(), self._open_file(path) as stream:
            content = bytes(stream.read(_MAX_FILE_BYTES + 1))
        if len(content) > _MAX_FILE_BYTES:
            raise OffsetError(
                f"{self.name}/{path} is not read: it has more than {_MAX_FILE_BYTES >> 20} MiB, the limit",
                remedy=RESTORE_FILE,
            )
        return content

    def _open_file(self, path: str) -> Any:
        if not self._is_local:
            return self._file_system.open_input_stream(self._full_path(path), compression=None)
        try:
            with self._reject_links(path), self._open_parent(path) as (folder_descriptor, name):
                return open(folders.open_regular(name, folder_descriptor=folder_descriptor), "rb")
        except OSError as e:
            raise OSError(e.errno, e.strerror, self._full_path(path)) from e

    def create(self, path: str, content: bytes) -> bool:
        """Create a file atomically and durably. Returns False if the file exists."""
        with self._errors_with_folder_name():
            if self._is_local:
                with self._open_parent(path, 0o777) as (folder_descriptor, name):
                    return _create_file(folder_descriptor, name, content)
            if self.read_bytes(path) is not None:
                return False
            self._upload(path, content)
            return True

    def replace(self, path: str, content: bytes) -> None:
        """Create or replace a file atomically and durably."""
        with self._errors_with_folder_name():
            if self._is_local:
                with self._open_parent(path, 0o777) as (folder_descriptor, name):
                    os.replace(
                        _write_temporary(folder_descriptor, name, content),
                        name,
                        src_dir_fd=folder_descriptor,
                        dst_dir_fd=folder_descriptor,
                    )
                    _sync_folder(folder_descriptor)
            else:
                self._upload(path, content)

    def _upload(self, path: str, content: bytes) -> None:
        full_path = self._full_path(path)
        self._file_system.create_dir(full_path.rpartition("/")[0], recursive=True)
        temporary_path = f"{full_path.rpartition('/')[0]}/.{uuid.uuid4().hex}"
        with self._file_system.open_output_stream(temporary_path, compression=None) as stream:
            stream.write(content)
        self._file_system.move(temporary_path, full_path)

    @property
    def _is_local(self) -> bool:
        return str(self._file_system.type_name) == "local"

    @contextmanager
    def _open_parent(self, path: str, mode: int | None = None) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of the folder of a local file, and the name of the file. Raises ``OSError`` for links."""
        *parents, name = path.split("/")
        with folders.open_subfolder(Path(self._root_path), parents, mode) as folder_descriptor:
            yield folder_descriptor, name

    @contextmanager
    def as_owner(self) -> Iterator[None]:
        """Run the block as the owner of this folder if the folder is local and this process runs as root. The block must not
        import modules, because the owner may not be able to read Python's files.

        The owner may change anything in the folder at any time, and lead this process elsewhere with links, or with another
        folder of this name. Raises ``OffsetError`` for links, if root cannot change to the owner, and if users other than the
        owner may replace the folder while root uses it.
        """
        with ExitStack() as stack:
            if self._is_local:
                with self._errors_with_folder_name():
                    owner = folders.owner_uid(os.stat(self._root_path))
                    self._check_not_replaceable(owner)
                    if os.geteuid() == folders.ROOT_ID != owner:
                        stack.enter_context(folders.as_user(owner))
                        if not folders.is_readable_or_missing(Path(self._root_path)):
                            raise PermissionError(f"the owner, {folders.user_text(owner)}, may not read this folder")
                    if (link := folders.link_in(Path(self._root_path))) is not None:
                        raise OffsetError(
                            f"{self.name} is not changed: {link} is a link, which could lead to files of other users",
                            remedy=self._remedy_of_link(),
                        )
            yield

    def _check_not_replaceable(self, owner: int) -> None:
        path = Path(self._root_path)
        if os.geteuid() != folders.ROOT_ID:  # only a warning: a user may be unable to change a Kubernetes volume's mode
            folders.warn_if_replaceable(path, "the checkpoint")
        elif (exposure := next(folders.exposures(path, owner), None)) is not None:
            raise OffsetError(
                f"{self.name} is not changed by root: {exposure.users_text} may replace {exposure.path}, or what is in it",
                remedy=f"{folders.remedy(exposure, 'the checkpoint', owner)}, or run this command as {folders.user_text(owner)}",
            )

    def copy(self, paths: Sequence[str], target: str) -> Folder:
        """Copy these files to a new folder with the name ``target`` beside this folder, and return the new folder. If the folder
        is local, the copies belong to its owner, and only the owner may read the new folders. A link raises an error, because it
        could lead to a file of another user.
        """
        system, root = (
            self._file_system,
            self._root_path[: len(self._root_path.rstrip("/")) - len(_base_name(self._root_path))] + target,
        )
        target_folder = Folder(self.name.rstrip("/")[: -len(_base_name(self.name))] + target, system, root)
        with self._errors_with_folder_name():
            if self._is_local:
                self._copy_local(paths, Path(root))
            else:
                for path in paths:
                    system.create_dir(target_folder._full_path(path).rpartition("/")[0], recursive=True)
                    system.copy_file(self._full_path(path), target_folder._full_path(path))
        return target_folder

    def _copy_local(self, paths: Sequence[str], target: Path) -> None:
        with ExitStack() as stack:
            new_folder = self._new_sibling(target)
            stack.callback(os.close, new_folder)
            stack.enter_context(self.as_owner())
            for path in paths:
                *parents, name = path.split("/")
                with (
                    self._open_parent(path) as (folder_descriptor, _),
                    folders.open_subfolder(new_folder, parents, folders.PRIVATE_MODE) as target_descriptor,
                ):
                    _copy_file(name, folder_descriptor, target_descriptor)

    def _new_sibling(self, target: Path) -> int:
        """Create the folder ``target`` for the owner of this folder, and return the descriptor of ``target``. If the owner may
        not create folders in the parent folder, root creates ``target``.
        """
        with folders.open_subfolder(target.parent) as parent:
            try:
                with self.as_owner():
                    os.mkdir(target.name, folders.PRIVATE_MODE, dir_fd=parent)
                    return folders.open_folder(target.name, parent)
            except PermissionError:
                if any(folders.exposures(target)):
                    # The owner could replace the parent by a link to another folder.
                    raise
                return folders.make_folder_for(os.stat(self._root_path), target.name, parent)

    def delete(self, paths: Sequence[str]) -> None:
        with self._errors_with_folder_name():
            for path in paths:
                if self._is_local:
                    with self._open_parent(path) as (folder_descriptor, name):
                        os.unlink(name, dir_fd=folder_descriptor)
                else:
                    self._file_system.delete_file(self._full_path(path))

    def delete_folder(self, subfolder: str) -> None:
        """Delete a subfolder and its content."""
        with self._errors_with_folder_name():
            if self._is_local:
                with self._open_parent(subfolder) as (folder_descriptor, name):
                    shutil.rmtree(name, dir_fd=folder_descriptor)
            else:
                self._file_system.delete_dir(self._full_path(subfolder))

    def _full_path(self, path: str) -> str:
        return f"{self._root_path.rstrip('/')}/{path}" if path else self._root_path

    @contextmanager
    def _errors_with_folder_name(self) -> Iterator[None]:
        try:
            yield
        except OffsetError:  # raised again, because an ``OffsetError`` is also a ``ValueError``
            raise
        except (OSError, ValueError, NotImplementedError) as e:
            raise OffsetError(
                f"{self.name}: {' '.join(str(e).split())}", remedy="Check the path and its permissions"
            ) from e


_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL
# The largest file that is read. An entry of the offset log for 100,000 queues has about 8 MB.
_MAX_FILE_BYTES = 64 << 20
RESTORE_FILE = "Restore that file as the owner of the checkpoint, or start the query with another checkpointLocation"


def _local_entry(path: str, entry: os.DirEntry[str]) -> _FileEntry:
    status = entry.stat(follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link", path)
    mode, changed_ms = status.st_mode, status.st_mtime_ns // 1_000_000
    return _FileEntry(path, stat.S_ISREG(mode), stat.S_ISDIR(mode), changed_ms)


def _copy_file(name: str, folder_descriptor: int, target_descriptor: int) -> None:
    """Copy a file with its mode to another folder. Raises ``OSError`` for a link, a pipe or a device."""
    with (
        open(folders.open_regular(name, folder_descriptor=folder_descriptor), "rb") as file,
        open(folders.open_regular(name, _CREATE_FLAGS, target_descriptor), "wb") as copy,
    ):
        os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        shutil.copyfileobj(file, copy)


def _write_temporary(folder_descriptor: int, name: str, content: bytes) -> str:
    """Write ``content`` to a temporary file for the file ``name`` in a folder, flush it to disk, and return its name."""
    temporary_name = f".{name}.{uuid.uuid4().hex}"
    with open(folders.open_regular(temporary_name, _CREATE_FLAGS, folder_descriptor, 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return temporary_name


# SMB shares and mounted buckets have no hard links.
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def _create_file(folder_descriptor: int, name: str, content: bytes) -> bool:
    temporary_name = _write_temporary(folder_descriptor, name, content)
    try:
        os.link(temporary_name, name, src_dir_fd=folder_descriptor, dst_dir_fd=folder_descriptor, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as e:
        if e.errno not in _NO_HARD_LINKS:
            raise
        if name in os.listdir(folder_descriptor):
            return False
        os.replace(temporary_name, name, src_dir_fd=folder_descriptor, dst_dir_fd=folder_descriptor)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary_name, dir_fd=folder_descriptor)
    _sync_folder(folder_descriptor)
    return True


def _sync_folder(folder_descriptor: int) -> None:
    """Flush to disk the directory entries of a folder, and the folder's own entry in its parent."""
    os.fsync(folder_descriptor)
    parent_descriptor = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder_descriptor)
    try:
        os.fsync(parent_descriptor)
    finally:
        os.close(parent_descriptor)


# The schemes of Spark that have another name in pyarrow.
_SCHEME_ALIASES = {"s3a": "s3", "s3n": "s3"}


def checkpoint_folder(location: str) -> Folder:
    """Return the folder of a ``checkpointLocation``, which Spark resolves as ``local_path`` does."""
    return open_folder(location if (path := local_path(location)) is None else str(path))


def local_path(location: str) -> Path | None:
    """Return the path to which Spark resolves a ``checkpointLocation``; None if the location is not on the local file system.
    This function only parses the text, and does not access the file system.

    As in Hadoop, a scheme needs no ``//`` and its case does not matter, ``%`` and ``~`` are ordinary characters, and ``..``
    removes the name before it, even if that name is a link.

    Raises ``OptionError`` if the path is too long.
    """
    scheme, colon, path_after_scheme = location.partition(":")
    if not colon or "/" in scheme:
        path = location
    elif scheme.lower() == "file":
        path = "/" + path_after_scheme.lstrip("/")
    else:
        return None
    if (problem := length_problem(path)) is not None:
        raise OptionError(f"the checkpointLocation is {shortened(location)}; {problem}", remedy="Name a shorter path")
    return Path(posixpath.normpath(Path(path).absolute()))


def open_folder(name: str) -> Folder:
    """Return the folder with a path or URI from a command line, where ``~`` is the user's home. Raises ``OffsetError`` if the
    folder cannot be reached, and ``OptionError`` if its path is too long.
    """
    from pyarrow.fs import FileSystem, LocalFileSystem

    if (path := local_path(os.path.expanduser(name))) is not None:
        if _base_name(name) in (".", "..", "~"):  # ``copy`` needs a name to which it can append
            name = str(path := path.resolve())
        return Folder(name, LocalFileSystem(), str(path))
    scheme, colon, authority_and_path = name.partition("://")
    name = f"{_SCHEME_ALIASES.get(scheme, scheme)}{colon}{authority_and_path}" if colon else name
    try:
        system, root = FileSystem.from_uri(name)
    except (OSError, ValueError, ImportError) as e:
        raise OffsetError(
            f"{name} cannot be reached: {' '.join(str(e).split())}",
            remedy="Give a path of this machine, or an address that pyarrow's file systems know: s3://, gs://, hdfs://, abfs://",
        ) from e
    return Folder(name, system, root.rstrip("/"))


def _base_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
