"""Certificates in files: files that are replaced while a program runs, and the authorities that the system trusts."""

from __future__ import annotations

import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.folders import has_own_rights
from rocketmq_spark.errors import RocketMQError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# How long the last value is used while loading fails. Loading may fail while files are being replaced: a file may be missing,
# or key and certificate may not match. If the file of an authority is missing for longer, the authority was removed on purpose,
# and must not be trusted.
MAX_STALE_S = 600.0
# A load that rejects a key may take minutes of work. So a failed load is repeated when a file was replaced, or after a pause of
# this factor times the load's duration. Failed loads then use at most a tenth of a processor's time.
_PAUSE_FACTOR = 10


class ReloadedValue(Generic[T]):
    """The result of ``load``, which is called again after one of the files in ``paths`` was replaced.

    While ``load`` fails, ``get`` returns the last value for at most ``MAX_STALE_S``, and logs one warning.
    """

    def __init__(self, paths: Sequence[str | None], load: Callable[[], T]) -> None:
        self._paths = tuple(os.path.expanduser(path) for path in paths if path)
        self._load = load
        self._loaded_value: tuple[tuple[object, ...], T] | None = None  # the stamps of the files, and the loaded value
        # The stamps of the files, the error, and when ``load`` may be called again.
        self._last_failure: tuple[tuple[object, ...], OSError | RocketMQError, Deadline] | None = None
        # When the loaded value expires; None while the files can be loaded.
        self._stale_deadline: Deadline | None = None

    def get(self) -> T:
        """Return the value. Raises the error of ``load`` if there is no value yet, or if the value has expired."""
        # While this process runs as another user, it may be unable to read the files.
        if self._loaded_value is not None and not has_own_rights():
            return self._loaded_value[1]
        stamps = tuple(map(_stamp, self._paths))
        if self._loaded_value is None or self._loaded_value[0] != stamps:
            try:
                self._loaded_value = stamps, self._reload(stamps)
            except (OSError, RocketMQError) as e:  # errors of ``ssl`` are OSErrors
                if self._loaded_value is None or not self._may_use_stale(e):
                    raise
                return self._loaded_value[1]
        if self._stale_deadline is not None:
            self._stale_deadline = None
            logger.warning("the TLS files %s can be read again", ", ".join(self._paths))
        return self._loaded_value[1]

    def _reload(self, stamps: tuple[object, ...]) -> T:
        if self._last_failure is not None and self._last_failure[0] == stamps and not self._last_failure[2].expired:
            raise self._last_failure[1].with_traceback(None)
        started_s = time.monotonic()
        try:
            return self._load()
        except (OSError, RocketMQError) as e:
            self._last_failure = stamps, e, Deadline.after(_PAUSE_FACTOR * (time.monotonic() - started_s))
            raise

    def _may_use_stale(self, error: Exception) -> bool:
        stale_deadline = self._stale_deadline  # copied, because another thread may reset the attribute to None
        if stale_deadline is None:
            stale_deadline = self._stale_deadline = Deadline.after(MAX_STALE_S)
            text = "the TLS files %s cannot be read any more: %s. New connections fail if that lasts longer than %d minutes"
            logger.warning(text, ", ".join(self._paths), error, MAX_STALE_S // 60)
        return not stale_deadline.expired


def _stamp(path: str) -> object:
    """Return a value that changes when the file or the right to read the file changes; None if the file does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


_BEGIN_MARKER, _END_MARKER = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
_HASHED_NAME = re.compile(r"[0-9a-f]{8}\.\d+")


def system_authorities() -> bytes:
    """Return the authorities that Python's ``ssl`` trusts by default, as PEM; empty if the system has none.

    The system stores authorities in a file, and in folders whose files are named by hashes. The variables SSL_CERT_FILE and
    SSL_CERT_DIR replace these paths.
    """
    certificates = dict.fromkeys(pem for path in _system_files() for pem in _certificates(_read_or_empty(path)))
    return b"\n".join([*certificates, b""]) if certificates else b""


def check_authorities(pem: bytes) -> None:
    """Raise ``ssl.SSLError`` if a certificate in the file content ``pem`` is damaged."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for certificate in _certificates(pem):  # ``ssl`` takes only ASCII
        context.load_verify_locations(cadata=certificate.decode("ascii", "backslashreplace"))


def _certificates(pem: bytes) -> Iterator[bytes]:
    """Yield the certificates in the content of a file. The time for this grows only linearly with the size of the file."""
    certificate_end = 0
    while (start := pem.find(_BEGIN_MARKER, certificate_end)) >= 0 and (
        end_marker_start := pem.find(_END_MARKER, start)
    ) >= 0:
        certificate_end = end_marker_start + len(_END_MARKER)
        yield pem[start:certificate_end]


def _system_files() -> Iterator[Path]:
    paths = ssl.get_default_verify_paths()
    yield Path(os.environ.get(paths.openssl_cafile_env) or paths.openssl_cafile)
    for folder in (os.environ.get(paths.openssl_capath_env) or paths.openssl_capath).split(os.pathsep):
        yield from sorted(path for path in Path(folder).glob("*.*") if _HASHED_NAME.fullmatch(path.name))


def _read_or_empty(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
