"""A folder of files, on this machine or wherever pyarrow's file systems reach: ``s3://``, ``hdfs://``, ``gs://``, ``abfs://``.

What goes wrong there is an ``OffsetError`` that names the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocketmq_spark.errors import OffsetError


@dataclass(frozen=True, slots=True)
class Folder:
    """``name`` is what the user calls it; paths of its files are relative to it."""

    name: str
    _system: Any
    _root: str

    def files(self, below: str = "", recursive: bool = False) -> dict[str, int]:
        """When each file was changed, in ms since 1970; nothing where there is no such folder."""
        from pyarrow.fs import FileSelector, FileType

        with self._named():
            selector = FileSelector(self._path(below), allow_not_found=True, recursive=recursive)
            found = [info for info in self._system.get_file_info(selector) if info.type == FileType.File]
        return {info.path[len(self._root) :].lstrip("/"): (info.mtime_ns or 0) // 1_000_000 for info in found}

    def exists(self, below: str = "") -> bool:
        """Whether there is a folder."""
        from pyarrow.fs import FileType

        with self._named():
            return bool(self._system.get_file_info(self._path(below)).type == FileType.Directory)

    def read(self, path: str) -> str:
        with self._named(), self._system.open_input_stream(self._path(path)) as stream:
            return str(stream.read(), "utf-8")

    def copy(self, paths: Sequence[str], target: str) -> Folder:
        """The folder ``target``, a name beside this one's, with copies of these files."""
        system, root = self._system, self._root[: len(self._root.rstrip("/")) - len(_last(self._root))] + target
        copied = Folder(self.name.rstrip("/")[: -len(_last(self.name))] + target, system, root)
        with self._named():
            for path in paths:
                system.create_dir(copied._path(path).rpartition("/")[0], recursive=True)
                system.copy_file(self._path(path), copied._path(path))
        return copied

    def delete(self, paths: Sequence[str]) -> None:
        with self._named():
            for path in paths:
                self._system.delete_file(self._path(path))

    def _path(self, below: str) -> str:
        return f"{self._root.rstrip('/')}/{below}" if below else self._root

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as e:
            raise OffsetError(
                f"{self.name}: {' '.join(str(e).split())}", remedy="Look at the path and its rights"
            ) from e


def folder(name: str) -> Folder:
    """A folder by its path, or by an address with a scheme. Raises ``OffsetError`` for one that cannot be reached."""
    from pyarrow.fs import FileSystem, LocalFileSystem

    if "://" not in name and not name.startswith("file:"):
        return Folder(name, LocalFileSystem(), str(Path(name).expanduser().absolute()))
    try:
        system, root = FileSystem.from_uri(name)
    except (OSError, ValueError, ImportError) as e:
        raise OffsetError(
            f"{name} cannot be reached: {' '.join(str(e).split())}",
            remedy="Give a path of this machine, or an address that pyarrow's file systems know: s3://, gs://, hdfs://, abfs://",
        ) from e
    return Folder(name, system, root.rstrip("/"))


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
