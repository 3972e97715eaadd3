"""docs/design.md is true: its rooms are the house's, its walks go one way, and what it names is there."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.test_house import ORDER, RANKS, ROOT, Module, modules

PAGE = (ROOT / "docs" / "design.md").read_text("utf-8")
RANK = {place: rank for rank, line in enumerate(RANKS.strip().splitlines()) for place in line.split()}
HOUSE = {module.inner: module for module in modules()}

# Heading of a walk, and whether it goes up the ranks, down, or back and forth.
WALKS = {
    "A message's bytes, from the socket to Spark": 1,
    "A row, from Spark to the acknowledgement": 0,
    "A message, from the broker to a listener": 0,
    "A message that is spooled": 0,
}


def section(heading: str) -> str:
    begin = PAGE.index(f"# {heading}\n")
    return re.split(r"^#", PAGE[begin + 1 :], maxsplit=1, flags=re.MULTILINE)[0]


def steps(heading: str) -> list[tuple[str, str]]:
    """Modules and text of each step."""
    found = re.findall(r"^\d+\. `([\w/]+)`(?: or `([\w/]+)`)?: (.*)$", section(heading), re.MULTILINE)
    assert len(found) == len(re.findall(r"^\d+\.", section(heading), re.MULTILINE)) >= 7
    return [(file.replace("/", "."), text) for *files, text in found for file in files if file]


def place(inner: str) -> tuple[int, int]:
    """The rank of a module: of its room, and inside of it."""
    room, _, leaf = inner.partition(".")
    return RANK[room], ORDER[room].split().index(leaf)


@functools.cache
def below(inner: str) -> frozenset[str]:
    """Whatever a module imports, directly or through others."""
    found: set[str] = set()
    left = [inner]
    while left:
        for name in set(HOUSE[left.pop()].own_imports()) & HOUSE.keys() - found:
            found.add(name)
            left.append(name)
    return frozenset(found)


def names(module: Module) -> set[str]:
    """Classes and functions of a module, inner ones too."""
    return {n.name for n in ast.walk(module.tree) if isinstance(n, (ast.ClassDef, ast.FunctionDef))}


@pytest.mark.parametrize("heading", [heading for heading, up in WALKS.items() if up])
def test_a_walk_goes_one_way(heading: str) -> None:
    walk = [inner for inner, _ in steps(heading)]
    places = [place(inner) for inner in walk]
    assert places == sorted(set(places))


@pytest.mark.parametrize("heading", [heading for heading, up in WALKS.items() if up])
def test_each_step_of_a_walk_is_reached_by_a_step_above_it(heading: str) -> None:
    downwards = [inner for inner, _ in steps(heading)][::-1]
    lost = [inner for i, inner in enumerate(downwards) if i and not any(inner in below(one) for one in downwards[:i])]
    assert not lost


@pytest.mark.parametrize("heading", WALKS)
def test_the_functions_of_a_walk_are_in_its_files(heading: str) -> None:
    wrong = [
        f"{inner}.{name}"
        for inner, text in steps(heading)
        for name in re.findall(r"`(\w+)`", text)
        if name not in names(HOUSE[inner])
    ]
    assert not wrong


def test_files_and_functions_that_the_page_names_are_there() -> None:
    wrong = []
    paths = re.findall(r"`((?:\w+/)+\w+)(?:\.(\w+))?`", PAGE)
    for path, name in paths:
        inner = path.replace("/", ".")
        module = HOUSE.get(inner)
        is_test = path.startswith("tests/")
        if not is_test and (module is None or (name and name not in names(module))):
            wrong.append(f"{path}.{name}".rstrip("."))
    assert len(paths) > 50
    assert not wrong


def test_the_rooms_are_those_of_the_house_in_their_order() -> None:
    rows = re.findall(r"^\| (.*?) \|", section("Rooms"), re.MULTILINE)[2:]
    named = [room for row in rows for room in re.findall(r"`(\w+)/?`", row)]
    built = {module.room for module in modules()} - {"__init__", "__main__"}
    assert set(named) == built | {"pyspark_rocketmq"}
    ranks = [RANK[room] for room in named if room in RANK]
    assert ranks == sorted(ranks)
