"""RocksDB's machine code, unpacked once for all brokers.

Left alone, a broker unpacks 12 MB of it from a jar at each start, and a broker that is killed leaves them in the folder for
temporary files for ever. Only ever an extra: where this knows no file for a machine, brokers unpack their own.
"""

from __future__ import annotations

import logging
import os
import platform
import zipfile
from collections.abc import Sequence
from pathlib import Path

_LOG = logging.getLogger(__name__)
_JAR = "rocketmq-rocksdb-"
# By what ``platform`` says of a machine; the names are those under which RocksDB's loader asks the JVM for them.
_FILES = {
    ("Linux", "x86_64"): "librocksdbjni-linux64.so",
    ("Linux", "aarch64"): "librocksdbjni-linux-aarch64.so",
    ("Darwin", "x86_64"): "librocksdbjni-osx-x86_64.jnilib",
    ("Darwin", "arm64"): "librocksdbjni-osx-arm64.jnilib",
}


def flags(jars: Sequence[Path], folder: Path) -> tuple[str, ...]:
    """JVM flags with which a broker finds the file in ``folder``; the file is put there if it is missing."""
    name = _FILES.get((platform.system(), platform.machine()))
    jar = next((jar for jar in jars if jar.name.startswith(_JAR)), None)
    if name is None or jar is None:
        return ()
    target = folder / jar.stem / name
    try:
        if not target.exists():
            _unpack(jar, target)
    except (OSError, KeyError, zipfile.BadZipFile) as e:
        _LOG.debug("brokers unpack %s themselves: %s", name, e)
        return ()
    return (f"-Djava.library.path={target.parent}",)


def _unpack(jar: Path, target: Path) -> None:
    """Renamed into place, so that no other process sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(jar) as archive:
        part.write_bytes(archive.read(target.name))
    os.replace(part, target)
