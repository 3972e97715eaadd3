"""The folder that confines paths in options, for processes whose options come from others.

A service that runs other people's queries opens files with its own rights. The variable ``ROCKETMQ_SPARK_PATHS`` names the folder
in which the files and folders of options must be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rocketmq_spark.errors import OptionError

PATHS_VARIABLE = "ROCKETMQ_SPARK_PATHS"


def confined(path: Path, option: str, variables: Mapping[str, str] = os.environ) -> Path:
    """Return ``path``. Raises ``OptionError`` if it leads out of the folder, also through links.

    Links may change, so callers check a path each time before they open it.
    """
    problem = confinement_problem(path, variables)
    if problem is not None:
        raise OptionError(
            f"option {option!r} is {str(path)!r}; {problem}",
            remedy="Give a path in that folder, or ask the operator who set the variable",
        )
    return path


def confinement_problem(path: Path, variables: Mapping[str, str] = os.environ) -> str | None:
    """Return what is wrong with a path, which may begin with ``~``, as a clause without the option; None if it is allowed."""
    folder = variables.get(PATHS_VARIABLE)
    if folder is None:
        return None
    if not os.path.isabs(folder):  # an empty or relative one would depend on the current folder
        return f"variable {PATHS_VARIABLE} is {folder!r}; expected the absolute path of a folder"
    try:
        inside = path.expanduser().resolve().is_relative_to(Path(folder).resolve())
    except (OSError, RuntimeError, ValueError) as e:  # a loop of links, an unknown home, a null character
        return f"it cannot be compared with the folder of variable {PATHS_VARIABLE}: {e}"
    return None if inside else f"variable {PATHS_VARIABLE} allows only paths in {folder!r}"
