"""Breaks lines of modules one by one and says which breaks no test noticed: ``python -m tests.mutants MODULE.py…``

It runs by hand, in a copy of the tree, and takes a second or more for each mutant. Mutants that change nothing stand in
``tests/equivalent_mutants.txt``, each with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tests.fix_house import PROCESSES
from tests.mutations import Entry, Mutant, entries, mutants, unknown

ROOT = Path(__file__).parents[1]
EQUIVALENT = "tests/equivalent_mutants.txt"
LEAST_S = 30.0
_LEFT = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", ".hypothesis", "site"
)


class Trouble(Exception):
    """Why nothing can be said: tests that fail by themselves, or that never see the module."""


class Stage(NamedTuple):
    """Tests that run together: what pytest is told to run, and how long that took when nothing was broken."""

    arguments: list[str]
    took_s: float = 0.0


def places(root: Path, module: str) -> list[list[str]]:
    """Where the tests of a module are, the nearest first: files of its name, then the folder of its room."""
    inside = PurePosixPath(module).parts[1:-1]
    name = f"test_{PurePosixPath(module).stem}.py"
    # The tests of spark/source are in tests/source, those of cli/doctor in tests/cli/doctor.
    named = [inside[n:] for n in range(len(inside))] + [inside[:n] for n in range(len(inside) - 1, 0, -1)]
    room = next((place for parts in named if (place := root.joinpath("tests", *parts)).is_dir()), None)
    files = sorted((room or root / "tests").rglob(name) if inside else (root / "tests").glob(name))
    files = files or sorted((root / "tests").rglob(name))
    return [
        [str(path.relative_to(root)) for path in found]
        for found in (files, [room] if room is not None else [])
        if found
    ]


def in_memory(where: Sequence[str]) -> str:
    """The expression of marks for tests without servers; all of a folder whose tests start processes have that mark."""
    of_processes = any(not PROCESSES.isdisjoint(PurePosixPath(each).parts) for each in where)
    return "not live and not spark" if of_processes else "not live and not spark and not slow"


class Tree:
    """A copy of a tree in which modules are broken and tests run."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy

    @contextlib.contextmanager
    def broken(self, module: str, source: bytes) -> Iterator[None]:
        """With other text for a module; without its bytecode, which is known by time and size alone."""
        path = self._copy / module
        whole = path.read_bytes()
        try:
            self._write(path, source)
            yield
        finally:
            self._write(path, whole)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def passes(self, arguments: Sequence[str], within_s: float | None = None) -> bool:
        """Whether tests pass; what hangs, or ends the process, does not. ``hung`` says then which."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
        env = {**os.environ, "PYTHONPATH": str(self._copy), "ROCKETMQ_SPARK_TEST_FIXED": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        # A session of its own: with tests that hang, what they started ends, too.
        tests = subprocess.Popen(
            command, cwd=self._copy, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.hung = False
        try:
            self.said = tests.communicate(timeout=within_s)[0].decode(errors="replace")
        except BaseException as e:
            os.killpg(tests.pid, signal.SIGKILL)
            tests.communicate()
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            self.hung = True
        return tests.returncode == 0

    def stages(self, module: str, given: Sequence[str]) -> list[Stage]:
        """The tests of a module, each stage tried once unbroken. Raises ``Trouble`` where they do not tell broken from whole."""
        found = []
        for where in [list(given)] if given else places(self._copy, module):
            arguments = ["-m", in_memory(where), *where]
            begin = time.monotonic()
            if self.passes(arguments):
                found.append(Stage(arguments, time.monotonic() - begin))
            elif "deselected" not in self.said or " failed" in self.said or " error" in self.said:
                raise Trouble(f"the tests of {module} do not pass unbroken:\n{self.said[-3000:]}")
        with self.broken(module, b"raise AssertionError('this module is broken')\n"):
            if self.survives(found):
                raise Trouble(f"no test in memory imports {module}; name some with --tests")
        return found

    def survives(self, stages: Sequence[Stage]) -> bool:
        return all(self.passes(stage.arguments, max(LEAST_S, 3 * stage.took_s)) for stage in stages)


def survivors(
    root: Path, module: str, given: Sequence[str], listed: Sequence[Entry], limit: int | None
) -> list[Mutant]:
    """The mutants of a module that no test notices, each told as soon as it is known; with a limit, some of all of it."""
    source = (root / module).read_bytes()
    known = Counter(entry.change for entry in listed if entry.path == module)
    made = mutants(source)
    # Of a line that stands twice in a function each has its entry.
    alike = Counter(mutant.change for mutant in made)
    wanted = [mutant for mutant in made if known[mutant.change] < alike[mutant.change]]
    if limit is not None and len(wanted) > limit:
        wanted = [wanted[n * len(wanted) // limit] for n in range(limit)]
    found, hung = [], 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(Path(folder, "tree"))
        shutil.copytree(root, Path(folder, "tree"), ignore=_LEFT)
        stages = tree.stages(module, given)
        for mutant in wanted:
            with tree.broken(module, mutant.applied(source)):
                if tree.survives(stages):
                    found.append(mutant)
                    print(f"{module}:{mutant.line} {mutant.function} `{mutant.before}` => `{mutant.after}`", flush=True)
                hung += tree.hung
    by_time = f", {hung} by tests that hung alone" if hung else ""
    print(f"{module}: {len(wanted)} mutants, {len(found)} that no test noticed{by_time}", flush=True)
    return found


def _source(root: Path, path: str) -> bytes | None:
    return (root / path).read_bytes() if (root / path).is_file() else None


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def _below(root: Path, module: str) -> str:
    """The path of a module from the root on: a whole path would lead out of the copy, to the module itself."""
    path = Path(root, module).resolve()
    if not path.is_relative_to(root.resolve()):
        raise Trouble(f"{module} is not below {root}")
    return str(path.relative_to(root.resolve()))


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """0 when every mutant is noticed, 1 when one is not, 2 when nothing can be said."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="+", metavar="MODULE.py", help="below the root of the repository")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="PATH", help="instead of the tests of the module's room"
    )
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="at most so many mutants of each module, of all of its parts"
    )
    given = parser.parse_args(arguments)
    try:
        listed = entries((_source(root, EQUIVALENT) or b"").decode())
    except ValueError as e:
        print(f"{EQUIVALENT}: {e}")
        return 2
    if gone := unknown(listed, lambda path: _source(root, path)):
        for entry in gone:
            print(f"{EQUIVALENT}: there is no such mutant: {entry.path}::{entry.change[0]} `{entry.change[1]}`")
        return 2
    try:
        modules = [_below(root, module) for module in given.modules]
        found = [survivors(root, module, given.tests, listed, given.limit) for module in modules]
    except (OSError, Trouble) as e:
        print(e)
        return 2
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
