"""The folder that confines paths in options, for processes that get options from other people.

A service that runs other people's queries opens files with its own rights. The variable ``ROCKETMQ_SPARK_PATHS`` names the folder
in which the files and folders of options must be. Other users may change the content of this folder while a path is checked. So
files are read through descriptors, and a folder is accepted only if other users cannot change it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from rocketmq_spark.base import folders
from rocketmq_spark.errors import OptionError

PATHS_VARIABLE = "ROCKETMQ_SPARK_PATHS"


_NEW_ENTRY = "new"  # a stand-in for the name of any new entry in a folder
# Limits of Linux (PATH_MAX, NAME_MAX). Time and memory to resolve a path grow with the square of the path's length.
MAX_PATH_BYTES, MAX_NAME_BYTES = 4096, 255
_SHOWN_CHARACTERS = 32  # if a text is too long, an error shows this number of characters
# The limit for a file of keys or certificates, because a sparse file may be larger than the memory.
MAX_FILE_BYTES = 4 << 20
# The limit for the number of certificates and other parts in a PEM file that an option names. OpenSSL sorts all certificates
# again for each added certificate, which takes a minute for 8,000 certificates. Systems trust about 150 authorities.
MAX_PEM_BLOCKS = 500


def check_safe(path: Path, option: str, variables: Mapping[str, str] = os.environ) -> Path:
    """Return ``path``, a folder or file that is later opened by its name. Raises ``OptionError`` if the path leads out of the
    confining folder, also through links. Also raises ``OptionError`` if another user may later replace a folder of the path, or
    what is in such a folder.
    """
    if PATHS_VARIABLE not in variables:
        return path
    check_confined(path, option, variables)
    if (exposure := next(folders.exposures(path.expanduser() / _NEW_ENTRY), None)) is not None:
        raise _path_error(
            path,
            option,
            f"{exposure.users_text} may replace {exposure.path}, or what is in it; the path could then lead out of the folder "
            f"that variable {PATHS_VARIABLE} names",
            "Name a folder that belongs to the user of this process, in folders to which only that user and root may write",
        )
    # The path is checked again, because other users may have changed links before the check of the folders.
    check_confined(path, option, variables)
    return path


def expand_home(path: str | Path, option: str) -> Path:
    """Replace ``~`` at the beginning of a path. Raises ``OptionError`` if the home folder is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as e:  # a container's user may have neither a name nor HOME
        raise _path_error(
            Path(path), option, f"that home is not known: {e}", "Give an absolute path, or set HOME"
        ) from e


def check_confined(path: Path, option: str, variables: Mapping[str, str] = os.environ) -> None:
    """Raise ``OptionError`` if a path leads out of the confining folder at the moment. When the path is used later, it may lead
    elsewhere.
    """
    if (problem := confinement_problem(path, variables)) is not None:
        raise _path_error(path, option, problem, "Give a path in that folder, or ask the operator who set the variable")


def read(path: Path, option: str, variables: Mapping[str, str] = os.environ) -> bytes:
    """Return the content of a file. Raises ``OptionError`` if the file is outside of the confining folder, and ``OSError`` if
    the file cannot be read, or has more than ``MAX_FILE_BYTES``.
    """
    with confined_file(path, option, variables) as name, open(name, "rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_FILE_BYTES} bytes", str(path))
    return content


def read_pem(path: Path, option: str, variables: Mapping[str, str] = os.environ) -> bytes:
    """Read certificates and keys as ``read`` does. Also raises ``OSError`` for a file with very many certificates and keys."""
    content = read(path, option, variables)
    if content.count(b"-----BEGIN ") > MAX_PEM_BLOCKS:
        raise OSError(errno.EFBIG, f"it has more than {MAX_PEM_BLOCKS} certificates and keys", str(path))
    return content


@contextlib.contextmanager
def pem_copy(path: Path, option: str) -> Iterator[str]:
    """Yield the name of a copy of what ``read_pem`` returns, for a library that opens files by their names and reads any size.
    The copy is a file in memory, or if the system has no such files, a temporary file that no folder contains.
    """
    content = read_pem(path, option)
    with _unnamed_file() as copy:
        copy.write(content)
        copy.flush()
        copy.seek(0)  # on macOS, a file that is opened as /dev/fd/… shares the position of the descriptor
        yield f"/dev/fd/{copy.fileno()}"


def _unnamed_file() -> IO[bytes]:
    with contextlib.suppress(AttributeError, OSError):  # the system may not have files in memory, or may forbid them
        return open(os.memfd_create("rocketmq-tls"), "w+b")
    return tempfile.TemporaryFile()


@contextlib.contextmanager
def confined_file(path: Path, option: str, variables: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a name by which a library may open a file inside the block. If ``ROCKETMQ_SPARK_PATHS`` is set, the name stands for
    an open file. Each folder of the file's path is opened in turn, because other users may replace links and folders on the
    path at any time.

    Raises the errors of ``read``.
    """
    if PATHS_VARIABLE not in variables:
        yield str(path)
        return
    check_confined(path, option, variables)
    confining_folder, real_path = Path(variables[PATHS_VARIABLE]).resolve(), path.expanduser().resolve()
    if not real_path.is_relative_to(confining_folder):
        raise _path_error(path, option, f"it leads to {str(real_path)!r} now", "Look at who changes its links")
    *folder_names, name = real_path.relative_to(confining_folder).parts or (".",)
    with folders.open_subfolder(confining_folder, folder_names) as folder_descriptor:
        descriptor = folders.open_regular(name, folder_descriptor=folder_descriptor)
    try:
        if os.fstat(descriptor).st_nlink > 1:  # some systems let other users link to files that they may not read
            raise OSError(errno.EMLINK, "it has another name, perhaps in another folder", str(path))
        yield f"/dev/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _path_error(path: Path, option: str, problem: str, remedy: str) -> OptionError:
    return OptionError(f"option {option!r} is {str(path)!r}; {problem}", remedy=remedy)


def length_problem(path: str) -> str | None:
    """Return a clause if a path, or a part of a path, is too long for the system; otherwise None. The check does not read the
    file system.
    """
    if (size := _size(path)) > MAX_PATH_BYTES:
        return f"it has {size} bytes; expected at most {MAX_PATH_BYTES}"
    for part in path.split("/"):
        if (size := _size(part)) > MAX_NAME_BYTES:
            return f"its part {shortened(part)} has {size} bytes; expected at most {MAX_NAME_BYTES}"
    return None


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def shortened(text: str) -> str:
    """Return the beginning of a text in quotation marks, because the whole text is too long for an error."""
    return repr(text[:_SHOWN_CHARACTERS] + "…")


def confinement_problem(path: Path, variables: Mapping[str, str] = os.environ) -> str | None:
    """Return a clause that says what is wrong with a path, which may begin with ``~``; None if the path is allowed."""
    folder = variables.get(PATHS_VARIABLE)
    if folder is None:
        return None
    if not os.path.isabs(folder):  # an empty or relative path would depend on the current folder
        return f"variable {PATHS_VARIABLE} is {folder!r}; expected the absolute path of a folder"
    try:
        is_inside = path.expanduser().resolve().is_relative_to(Path(folder).resolve())
    except (OSError, RuntimeError, ValueError) as e:  # a loop of links, an unknown home, a null character
        return f"it cannot be compared with the folder of variable {PATHS_VARIABLE}: {e}"
    return None if is_inside else f"variable {PATHS_VARIABLE} allows only paths in {folder!r}"
