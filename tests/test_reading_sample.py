"""The sample for readers: what counts as a name or a sentence, and what is drawn of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.reading_sample import Entry, drawn, main, names, sentences, shares

SOURCE = '''"""The first sentence. The second
one goes on."""

LIMIT = 3  # how many there are


class Store:
    """A store of things."""

    size: int

    def __init__(self, folder, *rest):
        # Two lines of a comment,
        # which are one text.
        self.folder = folder
        for path in rest:
            path = path
            log.warning("%s: is not there. Create it", path)
        raise ValueError(f"{folder!r} is no folder: name one")
'''


def test_names_of_all_kinds_are_found_once_per_scope():
    assert [(entry.kind, entry.text, entry.line) for entry in names(SOURCE)] == [
        ("constant", "LIMIT", 4), ("class", "Store", 7), ("attribute", "size", 10), ("parameter", "folder", 12),
        ("parameter", "rest", 12), ("attribute", "folder", 15), ("local", "path", 16),
    ]  # fmt: skip


def test_a_name_has_the_lines_around_it():
    assert names(SOURCE)[-1].around == (
        "    15 |         self.folder = folder",
        ">   16 |         for path in rest:",
        "    17 |             path = path",
    )
    assert names("a = 1")[0].around == (">    1 | a = 1",)


def test_sentences_of_all_kinds_are_found_with_their_lines():
    assert [(entry.kind, entry.text, entry.line) for entry in sentences(SOURCE)] == [
        ("docstring", "The first sentence.", 1), ("docstring", "The second one goes on.", 1),
        ("comment", "how many there are", 4), ("docstring", "A store of things.", 8),
        ("comment", "Two lines of a comment, which are one text.", 13), ("log line", "%s: is not there.", 18),
        ("error", "{folder!r} is no folder: name one", 19),
    ]  # fmt: skip


def test_a_sentence_has_the_lines_around_it():
    assert [line[:9] for line in sentences(SOURCE)[-1].around] == [
        "    16 | ", "    17 | ", "    18 | ", ">   19 | ",
    ]  # fmt: skip


def test_a_sentence_on_a_later_line_has_that_line():
    assert [(entry.text, entry.line) for entry in sentences('"""One of them is.\n\n    Two of them are."""')] == [
        ("One of them is.", 1), ("Two of them are.", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ({"a": 30, "b": 10}, 4, {"a": 3, "b": 1}),
        ({"a": 5, "b": 5, "c": 5}, 4, {"a": 2, "b": 1, "c": 1}),
        ({"a": 1, "b": 2}, 200, {"a": 1, "b": 2}),
        ({"a": 0}, 5, {}),
        ({}, 5, {}),
    ],
)
def test_rooms_have_shares_in_proportion(sizes: dict[str, int], count: int, expected: dict[str, int]) -> None:
    assert shares(sizes, count) == expected


def test_a_seed_draws_the_same_entries_and_another_seed_others():
    rooms = {room: [Entry("local", f"{room}{n}", n) for n in range(100)] for room in "ab"}
    sample = drawn(rooms, 20, seed=1)
    assert {room: len(set(entries)) for room, entries in sample.items()} == {"a": 10, "b": 10}
    assert drawn(rooms, 20, seed=1) == sample != drawn(rooms, 20, seed=2)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("spool/store.py", "wire/names.py", "errors.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SOURCE)
        path.with_name("__init__.py").touch()
    return tmp_path


def test_a_sample_can_be_marked(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "7"], package) == 0
    text = capsys.readouterr().out
    assert "--seed 7 --count 200" in text
    assert re.findall(r"^### (\w+) \((\d+)\)", text, re.MULTILINE) == [
        ("errors", "7"), ("spool", "7"), ("wire", "7"), ("errors", "7"), ("spool", "7"), ("wire", "7"),
    ]  # fmt: skip
    assert len(re.findall(r"^\[ \] \d+\. ", text, re.MULTILINE)) == 42
    assert "[ ] 10. attribute, spool/store.py:10: `size`\n     9 | \n>   10 |     size: int\n" in text


def test_a_sample_of_one_room_has_only_this_room(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--room", "wire", "--count", "3"], package) == 0
    places = re.findall(r"^\[ \] .*?, (\S+):\d+: ", capsys.readouterr().out, re.MULTILINE)
    assert places == ["wire/names.py"] * 6


def test_an_unknown_room_is_an_error_that_lists_the_rooms(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--room", "wires"], package)
    assert "--room wires: there is no such room; choose from __init__, errors, spool, wire" in capsys.readouterr().err
