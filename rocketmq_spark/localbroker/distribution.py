"""RocketMQ as a set of pinned jars, verified and cached per user, and RocksDB's native library, unpacked once.

``jars.lock`` lists every jar with sha256 and size, in sections that build on each other. A section's jars are in one
folder of the cache, named by the hash of the section's text, so that versions never share files. Every start
hashes the jars that it uses (a tenth of a second); a damaged or missing file is downloaded again.
One process at a time downloads. Other processes wait, and then use the downloaded files.

By itself, a broker unpacks a native library of 12 MB from a jar at each start, and a killed broker leaves the library in the
system's temporary folder. On platforms without an entry in ``_NATIVE_FILES``, brokers still unpack their own library.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rocketmq_spark.base import extras, folders, process
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import java, maven
from rocketmq_spark.localbroker.moved_folders import moved_folder_problem, revoke_write_if_safe

CACHE_VARIABLE = "ROCKETMQ_SPARK_CACHE"
VERSION = "5.5.0"
# Older versions of RocketMQ that can be run; each version has its own lock file.
OLDER_VERSIONS = ("4.9.7", "5.1.4", "5.3.1")
_FILE_MODE = 0o644  # all users may read the files in the cache, which are no secrets


@dataclass(frozen=True, slots=True)
class Jar:
    """A jar with its line in the lock file."""

    coordinate: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        _, artifact, version, *classifier = self.coordinate.split(":")
        return "-".join((artifact, version, *classifier)) + ".jar"


@dataclass(frozen=True, slots=True)
class Section:
    """A named set of jars; ``key`` is the name of its folder in the cache."""

    name: str
    jars: tuple[Jar, ...]
    key: str


def read_lock_file(text: str | None = None, version: str = VERSION) -> Mapping[str, Section]:
    """The sections of ``jars.lock``, or of the lock file of an older version, in the order of the file."""
    if text is None:
        name = "jars.lock" if version == VERSION else f"jars-{version}.lock"
        text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    sections = {}
    for part in re.split(r"^# (?=\[)", text, flags=re.MULTILINE)[1:]:
        header_line, *lines = part.splitlines()
        name = header_line[1 : header_line.index("]")]
        rows = [line.split() for line in lines if line.strip() and not line.startswith("#")]
        jars = tuple(Jar(coordinate, sha256, int(size)) for coordinate, sha256, size in rows)
        key = hashlib.sha256("\n".join(" ".join(row) for row in rows).encode()).hexdigest()[:16]
        sections[name] = Section(name, jars, f"{name}-{key}")
    return sections


def cache_folder() -> Path:
    """Return the folder for jars and class-data archives: ROCKETMQ_SPARK_CACHE, or the user's cache folder. If the user's cache
    folder is not safe or cannot be created, as in containers with random uids, returns a folder among temporary files.

    The files in the folder are executed. So the folder and the folders in it must belong to this user or root, only this user may
    write there, and no other user may replace a folder above. Raises ``LocalBrokerError`` if another user may change these files.
    """
    if configured_folder := os.environ.get(CACHE_VARIABLE):
        return _prepare_cache(Path(configured_folder).expanduser().absolute())
    user_cache = java.user_cache()
    try:
        if _prepare_cache(user_cache).is_dir():
            return user_cache
        problem = f"The cache {user_cache} cannot be created"
    except LocalBrokerError as e:
        problem = e.message
    temporary_folder = Path(tempfile.gettempdir(), f"rocketmq-spark-{os.geteuid()}")
    warning = "%s. LocalBroker uses %s instead; set %s to a folder that is kept"
    process.get_or_create(
        "cache", temporary_folder, functools.partial(_LOG.warning, warning, problem, temporary_folder, CACHE_VARIABLE)
    )
    if temporary_folder.is_symlink() or folders.foreign_file(temporary_folder, root_may_own=False) is not None:
        # Any user may have created the folder.
        raise LocalBrokerError(
            f"{temporary_folder} is a link, or belongs to another user; files from there would be executed",
            remedy=f"Name a folder of your own with {CACHE_VARIABLE}",
        )
    return _prepare_cache(temporary_folder)


def _prepare_cache(folder: Path) -> Path:
    """Create the cache for this user only. If the cache exists, revoke the right of other users to write to it and to its
    folders. If the cache is not safe, changes no mode and raises ``LocalBrokerError``.
    """
    with contextlib.suppress(OSError):  # if this fails, the first write raises an error with the reason
        folders.make_folders(folder)
    _check_cache_folders(folder, _can_revoke_write)
    problem = None
    with contextlib.suppress(OSError):  # a cache that cannot be read is not used
        problem = revoke_write_if_safe(folder, functools.partial(_moved_folder_problem, folder))
    if problem is not None:
        raise LocalBrokerError(
            f"The cache {folder} is not used: {problem}",
            remedy=f"Name a new folder with {CACHE_VARIABLE}, or let its owner run: chmod go-w",
        )
    _check_cache_folders(folder, folders.revoke_write)  # from here on, others cannot change the cache
    return folder


# Names of the folders of this package in a cache. A user may have other folders there.
_OWN_FOLDERS = ("archives", "background", "demo", "jars", "natives", "ports", "run")


def _moved_folder_problem(cache: Path, others_could_write: bool) -> str | None:
    own_folders = [cache / name for name in _OWN_FOLDERS if os.path.lexists(cache / name)]
    return next(
        filter(
            None,
            (
                moved_folder_problem(own_folder, others_could_write, _inner_folders(own_folder))
                for own_folder in own_folders
            ),
        ),
        None,
    )


def _inner_folders(own_folder: Path) -> Iterator[Path]:
    """Return the folders in a folder of this package, without the data folder of ``broker start``, because ``workspace`` checks
    that folder.
    """
    return (folder for folder in _folders_in(own_folder) if (own_folder.name, folder.name) != BACKGROUND_DATA)


BACKGROUND_DATA = ("background", "data")


def _check_cache_folders(folder: Path, revoke_write: Callable[[Path], bool]) -> None:
    """Check a cache and the folders in it, and call ``revoke_write`` for the cache and the folders of this package. Other
    folders, such as data folders, only need the right owner.
    """
    _check_folder(folder, revoke_write)
    _check_folders_above(folder)
    for inner_folder in _folders_in(folder):
        if inner_folder.name not in _OWN_FOLDERS:
            _check_owner(inner_folder)
            continue
        _check_folder(inner_folder, revoke_write)
        for nested_folder in _inner_folders(inner_folder):
            _check_folder(nested_folder, revoke_write)


def _can_revoke_write(folder: Path) -> bool:
    """Whether ``folders.revoke_write`` would succeed. This function does not change the folder."""
    status = folder.stat()
    return status.st_uid == os.geteuid() or not folders.others_may_write(status)


def _folders_in(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # a download removes its folder when it ends
        for entry in entries:
            with contextlib.suppress(OSError):  # the entry may be a broken link
                if entry.is_dir():
                    yield Path(entry.path)


def _check_folder(folder: Path, revoke_write: Callable[[Path], bool]) -> None:
    _check_owner(folder)
    with contextlib.suppress(OSError):  # ignored here: a folder that cannot be read is not used
        if folders.is_shared_folder(folder.stat()):
            raise LocalBrokerError(
                f"All users may write to {folder}; files from there would be executed",
                remedy=f"Name a new folder in it with {CACHE_VARIABLE}",
            )
        if not revoke_write(folder):
            raise _unsafe_error(f"Others may write to {folder}")


def _check_owner(folder: Path) -> None:
    if (foreign_file := folders.foreign_file(folder)) is not None:
        raise _unsafe_error(str(foreign_file))
    if folder.is_symlink():
        _check_folders_above(folder)


def _unsafe_error(problem: str) -> LocalBrokerError:
    return LocalBrokerError(
        f"{problem}; files from there would be executed",
        remedy=f"Remove it, or name a folder of your own with {CACHE_VARIABLE}",
    )


def _check_folders_above(folder: Path) -> None:
    exposure = next(folders.exposures(folder), None)
    if exposure is not None:
        raise LocalBrokerError(
            f"The cache {folder} lies in {exposure}; files from there would be executed",
            remedy=f"Name a cache elsewhere with {CACHE_VARIABLE}, or let the folder's owner run chmod go-w (1777 if others "
            "need it)",
        )


def fetch(names: Sequence[str] = ("core",), quiet: bool = False, version: str = VERSION) -> list[Path]:
    """Return the verified jars of the named sections, in the order of the lock file. Missing jars are downloaded first.

    Links are resolved, because a class-data archive is valid only for the paths of jars with which it was made.
    """
    sections = [section for name, section in read_lock_file(version=version).items() if name in names]
    unknown_names = set(names).difference(s.name for s in sections)
    if unknown_names:
        raise LocalBrokerError(f"jars.lock has no section {', '.join(sorted(unknown_names))}")
    cache = cache_folder()
    if _unusable_jars(cache, sections):
        with (
            writing_to(cache),
            file_locked(cache / "jars" / "lock", lambda: _print(quiet, "Waiting for another download")),
        ):
            # A killed process left this folder, because a running process would hold the lock.
            for abandoned_folder in (cache / "jars").glob("fetch-*"):
                shutil.rmtree(abandoned_folder, ignore_errors=True)
            unusable_jars = _unusable_jars(cache, sections)
            if unusable_jars:
                _download(cache, unusable_jars, quiet, version)
    jars = (cache / "jars").resolve()
    return [jars / s.key / jar.file_name for s in sections for jar in s.jars]


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Convert the error of a failed write (full disk, no permission) into a ``LocalBrokerError`` of one sentence."""
    try:
        yield
    except OSError as e:
        is_inside = e.filename is None or Path(os.fsdecode(e.filename)).is_relative_to(folder)
        raise LocalBrokerError(
            f"Could not write to {folder if is_inside else e.filename}: {e.strerror or e}",
            remedy=f"Free some space, or name another folder ({CACHE_VARIABLE} for the cache, data= for the data)",
        ) from e


@contextlib.contextmanager
def file_locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of a file. The kernel releases the lock when the process ends, also after a kill."""
    folders.make_folders(path.parent, folders.READABLE_MODE)
    with open(folders.open_private(path, os.O_RDWR | os.O_CREAT), "a") as file:
        if not folders.try_lock(file):
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        owner_pid = os.getpid()
        try:
            yield
        finally:
            # A forked child has the file open, too, and would keep the lock. So the process that took the lock must unlock the
            # file explicitly, and the child must not unlock it.
            if os.getpid() == owner_pid:
                fcntl.flock(file, fcntl.LOCK_UN)


def _unusable_jars(cache: Path, sections: Sequence[Section]) -> list[tuple[Section, Jar]]:
    jars = [(section, jar) for section in sections for jar in section.jars]
    with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter lock, so threads hash in parallel
        usable_flags = pool.map(
            lambda section_and_jar: _is_usable(
                cache / "jars" / section_and_jar[0].key / section_and_jar[1].file_name, section_and_jar[1]
            ),
            jars,
        )
        return [section_and_jar for section_and_jar, is_usable in zip(jars, usable_flags, strict=True) if not is_usable]


def _is_usable(path: Path, jar: Jar) -> bool:
    """Whether the jar is sound, and no other user can change it. If others may write to the jar, this function first replaces
    the jar by a copy, because others may have the file open.
    """
    try:
        if folders.foreign_file(path) is not None or (path.is_symlink() and any(folders.exposures(path))):
            return False
        if folders.others_may_write(path.stat()):
            folders.replace_file(path, folders.read_regular(path), _FILE_MODE)
        return folders.revoke_write(path) and is_sound(path, jar)
    except OSError:
        return False


def is_sound(path: Path, jar: Jar) -> bool:
    """Whether the file has the size and hash in the lock file."""
    try:
        if path.stat().st_size != jar.size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == jar.sha256
    except OSError:
        return False


def _download(cache: Path, unusable_jars: Sequence[tuple[Section, Jar]], quiet: bool, version: str) -> None:
    """Download into a separate folder, verify, then rename each file to its target, so that no process sees a part of a jar."""
    jars = [jar for _, jar in unusable_jars]
    download_folder = Path(tempfile.mkdtemp(prefix="fetch-", dir=cache / "jars"))
    try:
        title = f"Fetching RocketMQ {version}: {len(jars)} jars"
        with _progress(title, sum(jar.size for jar in jars), quiet) as progress:
            sizes = {jar.coordinate: jar.size for jar in jars}
            files = maven.download(list(sizes), download_folder, progress, sizes)
        mismatched_jars = [jar for jar in jars if not is_sound(files[jar.coordinate], jar)]
        if mismatched_jars:
            raise LocalBrokerError(
                f"{mismatched_jars[0].coordinate} does not match its hash in jars.lock, and was discarded",
                remedy="Check the mirror, or the proxy that changes downloads",
            )
        for section, jar in unusable_jars:
            target = cache / "jars" / section.key / jar.file_name
            folders.make_folders(target.parent, folders.READABLE_MODE)
            # The mode is set here, before others can open the file, so that it does not depend on the umask.
            folders.set_mode(files[jar.coordinate], _FILE_MODE)
            os.replace(files[jar.coordinate], target)
    finally:
        shutil.rmtree(download_folder, ignore_errors=True)


@contextlib.contextmanager
def _progress(description: str, total_bytes: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    title = f"{description}, {total_bytes / 1e6:.0f} MB"
    if quiet or not sys.stderr.isatty() or not extras.is_installed("rich"):
        _print(quiet, f"{title} ...")
        yield lambda arrived_bytes: None
        _print(quiet, "RocketMQ is fetched")
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda arrived_bytes: bar.update(task, completed=min(arrived_bytes, total_bytes))


def _print(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)


_LOG = logging.getLogger(__name__)
_NATIVE_JAR_PREFIX = "rocketmq-rocksdb-"
# Native libraries by the values of ``platform``; the names are those that RocksDB's loader requests from the JVM.
_NATIVE_FILES = {
    ("Linux", "x86_64"): "librocksdbjni-linux64.so",
    ("Linux", "aarch64"): "librocksdbjni-linux-aarch64.so",
    ("Darwin", "x86_64"): "librocksdbjni-osx-x86_64.jnilib",
    ("Darwin", "arm64"): "librocksdbjni-osx-arm64.jnilib",
}


def native_flags(jars: Sequence[Path], folder: Path) -> tuple[str, ...]:
    """Return JVM flags with which a broker finds the native library in ``folder``. First writes the library from the jar if the
    folder does not have the same library.

    Returns no flags if other users may write to the folder: brokers then unpack the library themselves.
    """
    name = _NATIVE_FILES.get((platform.system(), platform.machine()))
    jar = next((jar for jar in jars if jar.name.startswith(_NATIVE_JAR_PREFIX)), None)
    if name is None or jar is None:
        return ()
    target = folder / jar.stem / name
    try:
        with zipfile.ZipFile(jar) as archive:
            library_bytes = archive.read(name)
        for folder_to_check in (folder, target.parent):
            folders.make_folders(folder_to_check, folders.READABLE_MODE)
            if not folders.is_writable_by_owner_only(folder_to_check):
                raise PermissionError(f"others may write to {folder_to_check}")
        if not (folders.is_writable_by_owner_only(target) and target.read_bytes() == library_bytes):
            folders.replace_file(target, library_bytes, _FILE_MODE)
    except (OSError, KeyError, zipfile.BadZipFile) as e:
        _LOG.debug("brokers unpack %s themselves: %s", name, e)
        return ()
    return (f"-Djava.library.path={target.parent}",)
