"""The Java that runs the servers, and a class-data archive (CDS) that makes later starts a third shorter.

The Java in JAVA_HOME is preferred to the Java on PATH. Java must have version 17 or newer, which PySpark requires, too. The
version is read from the ``release`` file of the installation. If there is no ``release`` file, ``java -version`` is run, which
takes a tenth of a second.

Without an archive, the servers record the classes that they load. Once the servers are up, a background JVM with the lowest
priority makes the archive from the lists of these classes. The archive is optional: after a failure, starts are as slow as
before, and a JVM ignores an archive that does not match. The key of an archive contains the JVM, and the size and time of each
jar, because the JVM compares sizes and times.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocketmq_spark.base import folders
from rocketmq_spark.errors import LocalBrokerError

MIN_VERSION = 17
INSTALL_REMEDY = (
    "Install a Java runtime (Debian, Ubuntu: apt install openjdk-17-jre-headless; Fedora: dnf install "
    "java-21-openjdk-headless; macOS: brew install openjdk@21, then export JAVA_HOME=$(brew --prefix openjdk@21); "
    "conda: conda install -c conda-forge openjdk=21) or set JAVA_HOME to one"
)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime; ``identity`` differs between builds that cannot share a class-data archive."""

    path: Path
    major_version: int
    identity: str


def find_java() -> Java:
    """Return the Java to use. Raises ``LocalBrokerError`` if there is no Java, or only one that is too old."""
    path = _java_program()
    identity = _release_text(path) or _version_output(path)
    major = _major_version(identity)
    if major is None:
        raise LocalBrokerError(f"{path} reports no Java version", remedy=INSTALL_REMEDY)
    if major < MIN_VERSION:
        raise LocalBrokerError(
            f"Java {MIN_VERSION} or newer is needed, but {path} is Java {major}", remedy=INSTALL_REMEDY
        )
    return Java(path, major, f"{path.resolve()}\n{identity}")


def _java_program() -> Path:
    home = os.environ.get("JAVA_HOME")
    if home:
        path = Path(home, "bin", "java")
        if not os.access(path, os.X_OK):
            raise LocalBrokerError(f"JAVA_HOME is {home}, but there is no bin/java in it", remedy=INSTALL_REMEDY)
        return path
    program = shutil.which("java")
    if program is None:
        raise LocalBrokerError(
            f"Java {MIN_VERSION} or newer is needed, and there is none: no java on PATH, JAVA_HOME is not set",
            remedy=INSTALL_REMEDY,
        )
    return Path(program)


def _release_text(path: Path) -> str | None:
    try:
        text = (path.resolve().parent.parent / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text if "JAVA_VERSION=" in text else None


def _version_output(path: Path) -> str:
    try:
        result = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise LocalBrokerError(f"{path} could not be run", remark=str(e), remedy=INSTALL_REMEDY) from e
    return result.stderr + result.stdout


def _major_version(identity: str) -> int | None:
    """The major version in ``JAVA_VERSION="17.0.15"``, ``version "1.8.0_402"`` or ``version "21"``."""
    match = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', identity)
    return int(match[1]) if match else None


_LOG = logging.getLogger(__name__)
_MAX_ARCHIVES = 6
# A dump never takes this long, so temporary files that are older belong to a killed process.
_MAX_DUMP_S = 3600
# Names of archives, and of files that a dump creates beside them. Other files in the folder do not belong to this package.
_OWN_FILE_NAME = re.compile(r"[0-9a-f]{16}\.(jsa|lock|part|classes|log)")
CLASS_LIST = "classes.lst"
_CLASS_ID = re.compile(r" id: \d+.*$")

Spawn = Callable[[list[str], Path], "subprocess.Popen[bytes]"]


def user_cache() -> Path:
    """Return the folder of this package in the user's cache. ``XDG_CACHE_HOME`` is ignored if it names a relative path, or a
    folder of another user.
    """
    if sys.platform == "darwin":
        return folders.home() / "Library" / "Caches" / "rocketmq-spark"
    configured_folder = os.environ.get("XDG_CACHE_HOME")
    is_usable = (
        configured_folder and os.path.isabs(configured_folder) and folders.foreign_file(Path(configured_folder)) is None
    )
    return Path(configured_folder if configured_folder and is_usable else folders.home() / ".cache") / "rocketmq-spark"


def _is_safe_folder(folder: Path) -> bool:
    """Whether this user or root owns a folder and its parent, and no other user may write to them or replace a folder above them.
    The folder may be missing.
    """
    try:
        folders_to_check = (folder.parent, folder, folder.resolve().parent)
        return all(
            folders.is_writable_by_owner_only(folder_to_check)
            for folder_to_check in folders_to_check
            if folder_to_check.exists()
        ) and not any(folders.exposures(folder))
    except (OSError, RuntimeError):  # the folder cannot be read, or is a link that leads to itself
        return False


class Archive:
    """The class-data archive for one class path and one JVM.

    The archive contains code that the JVM does not compare with the jars. So the archive is in ``folder`` only if no other user
    may change files there; otherwise the archive is in the user's own cache.
    """

    def __init__(self, folder: Path, java: Java, jars: Sequence[Path]) -> None:
        self._java = java
        self._class_path = os.pathsep.join(map(str, jars))
        jar_stamps = [f"{jar} {jar.stat().st_size} {jar.stat().st_mtime_ns}" for jar in jars]
        key = hashlib.sha256("\n".join([java.identity, *jar_stamps]).encode()).hexdigest()[:16]
        self.path = folder / f"{key}.jsa"
        if not (
            _is_safe_folder(folder)
            and (not self.path.exists() or self._is_usable() or folder.stat().st_uid == os.geteuid())
        ):
            self.path = user_cache() / "archives" / self.path.name
        self._dump_process: subprocess.Popen[bytes] | None = None
        self._stop_event = threading.Event()

    def flags(self, home: Path) -> list[str]:
        """JVM flags for a server at ``home``. With these flags, the server uses the archive, or records classes for a new
        archive.
        """
        if self._is_usable():
            with contextlib.suppress(OSError):
                os.utime(self.path)
            return [f"-XX:SharedArchiveFile={self.path}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
        return [f"-XX:DumpLoadedClassList={home / CLASS_LIST}"]

    def _is_usable(self) -> bool:
        return folders.is_writable_by_owner_only(self.path) and _is_safe_folder(self.path.parent)

    def discard(self) -> bool:
        """Remove the archive, in case it caused a failed start. Returns whether an archive existed."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True

    def start_dump(self, server_folders: Sequence[Path], spawn: Spawn) -> None:
        """Make the archive in the background, unless it exists or another process is making it."""
        if not self._is_usable() and self._dump_process is None:
            threading.Thread(
                target=self._make_archive, args=(server_folders, spawn), name="class-data archive", daemon=True
            ).start()

    def stop(self) -> None:
        """Abort a running dump."""
        self._stop_event.set()
        if self._dump_process is not None:
            self._dump_process.kill()
            self._dump_process.wait()

    def _make_archive(self, server_folders: Sequence[Path], spawn: Spawn) -> None:
        try:
            folders.make_folders(self.path.parent, folders.READABLE_MODE)
            if not _is_safe_folder(self.path.parent):
                raise PermissionError(f"others may write to {self.path.parent}")
            with open(folders.open_private(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT), "a") as lock:
                if not folders.try_lock(lock):
                    _LOG.debug("another process makes the class-data archive")
                    return
                os.utime(lock.name)
                if not self._is_usable():
                    self._run_dump(server_folders, spawn)
        except (OSError, ValueError) as e:
            _LOG.debug("no class-data archive: %s", e)

    def _run_dump(self, server_folders: Sequence[Path], spawn: Spawn) -> None:
        """Make the archive. The caller holds the lock of the archive, so files that a killed dump left may be overwritten."""
        part_file, class_list = self.path.with_suffix(".part"), self.path.with_suffix(".classes")
        for path in (part_file, class_list, self.path.with_suffix(".log")):
            path.unlink(missing_ok=True)  # removed so that a write cannot follow a link of this name
        folders.replace_file(class_list, "\n".join(_merged_class_lists(server_folders)) + "\n")
        command = [
            *([nice_program, "-n", "19"] if (nice_program := shutil.which("nice")) else []),
            str(self._java.path), "-Xshare:dump", f"-XX:SharedClassListFile={class_list}",
            f"-XX:SharedArchiveFile={part_file}", "-XX:+UseSerialGC", "-Xmx256m", "-cp", self._class_path,
        ]  # fmt: skip
        with spawn(command, self.path.with_suffix(".log")) as dump_process:
            self._dump_process = dump_process
            if self._stop_event.is_set():
                dump_process.kill()
        if dump_process.returncode == 0:
            folders.set_mode(part_file, 0o644)  # servers of other users may use a cache of root
            os.replace(part_file, self.path)
            self._prune()
        for path in (part_file, class_list, self.path.with_suffix(".log")):
            path.unlink(missing_ok=True)

    def _prune(self) -> None:
        """Delete superseded archives, and files of dumps whose process was killed."""
        own_files = [path for path in self.path.parent.iterdir() if _OWN_FILE_NAME.fullmatch(path.name)]
        modified_s = {path: path.stat().st_mtime for path in own_files}
        archives = sorted(
            (path for path in own_files if path.suffix == ".jsa"), key=modified_s.__getitem__, reverse=True
        )
        kept_keys, stale_before_s = {path.stem for path in archives[:_MAX_ARCHIVES]}, time.time() - _MAX_DUMP_S
        for path in own_files:
            if path in archives[_MAX_ARCHIVES:] or (path.stem not in kept_keys and modified_s[path] < stale_before_s):
                path.unlink(missing_ok=True)


def _merged_class_lists(server_folders: Sequence[Path]) -> dict[str, None]:
    """Return the lines of all servers' class lists, without repetitions. Omits the last line of each list, because a server may
    still be writing that line.

    The numbers that newer JVMs give to classes are removed, because they differ between lists, and are not needed.
    """
    lines: dict[str, None] = {}
    for home in server_folders:
        text = (home / CLASS_LIST).read_text(encoding="utf-8", errors="replace")
        lines.update(dict.fromkeys(_CLASS_ID.sub("", line) for line in text.splitlines()[:-1] if line[:1] != "#"))
    return lines
