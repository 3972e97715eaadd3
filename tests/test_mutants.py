"""The script that breaks modules: what it changes, and that it tells what is noticed from what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutants
from tests.mutations import Change, Entry, entries, unknown
from tests.mutations import mutants as found_in

MODULE = '''"""A module."""


def larger(a, b):
    """Which of two is larger."""
    return a if a > b else b


def kept(items, room):
    room -= 1
    return items[:3]
'''
TESTS = """from package.room.module import kept, larger


def test_larger():
    assert (larger(1, 2), larger(3, 1)) == (2, 3)


def test_kept():
    assert kept([1, 2, 3, 4], 9) == [1, 2, 3]
"""
# That two are equal makes no difference, and nobody looks at the room.
UNSEEN = {
    ("larger", "return a if a > b else b", "return a if a >= b else b"),
    ("kept", "room -= 1", "pass"),
    ("kept", "room -= 1", "room -= 2"),
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one module and its tests, which need none of the plug-ins that are installed: half of the time of a run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for path, text in {"package/room/module.py": MODULE, "tests/room/test_module.py": TESTS}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def files(tree: Path) -> dict[str, str]:
    return {str(path.relative_to(tree)): path.read_text() for path in tree.rglob("*") if path.is_file()}


def listed(tree: Path, *changes: Change) -> None:
    lines = (f"package/room/module.py::{where} `{before}` => `{after}`: it is so" for where, before, after in changes)
    (tree / mutants.EQUIVALENT).write_text("\n".join(("# Head", "", *lines)))


def told(text: str) -> set[Change]:
    """The survivors that were printed."""
    parts = [line.split("`") for line in text.splitlines() if "`" in line]
    return {(part[0].split()[1], part[1], part[3]) for part in parts}


def test_unnoticed_mutants_are_reported_and_files_stay_unchanged(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = files(tree)
    assert mutants.main(["package/room/module.py"], tree) == 1
    said = capfd.readouterr().out
    assert told(said) == UNSEEN
    assert "package/room/module.py:6 larger `" in said
    assert files(tree) == before
    listed(tree, *UNSEEN)
    assert mutants.main(["package/room/module.py", "--limit", "2"], tree) == 0
    assert "package/room/module.py: 2 mutants, 0 that" in capfd.readouterr().out


def test_an_entry_that_no_mutant_has_is_an_error(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    listed(tree, ("kept", "room += 1", "pass"))
    assert mutants.main(["package/room/module.py"], tree) == 2
    assert "there is no such mutant: package/room/module.py::kept `room += 1`" in capfd.readouterr().out
    (tree / mutants.EQUIVALENT).write_text("package/room/module.py:10 is fine")
    assert mutants.main(["package/room/module.py"], tree) == 2
    assert "no entry of the form" in capfd.readouterr().out


def test_a_whole_path_is_broken_in_the_copy_too(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = files(tree)
    assert mutants.main([str(tree / "package/room/module.py"), "--limit", "1"], tree) in (0, 1)
    assert "package/room/module.py: 1 mutants" in capfd.readouterr().out
    assert files(tree) == before
    assert mutants.main([str(tree.parent / "module.py")], tree) == 2
    assert "module.py is not below" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        mutants.main(["package/room/module.py", "--limit", "0"], tree)


def test_of_lines_that_are_alike_each_has_its_entry(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    twice = "def kept(room):\n    room -= 1\n    room -= 1\n    return room\n"
    (tree / "package/room/module.py").write_text(twice)
    one = ("kept", "room -= 1", "pass")
    alike = [mutant.change for mutant in found_in(twice.encode())].count(one)
    assert alike == 2
    listed(tree, one)
    (tree / "tests/room/test_module.py").write_text(
        "from package.room.module import kept\n\ndef test_it():\n    kept(1)\n"
    )
    assert mutants.main(["package/room/module.py"], tree) == 1
    assert capfd.readouterr().out.count("kept `room -= 1` => `pass`") == 2
    listed(tree, one, one)
    assert mutants.main(["package/room/module.py"], tree) == 1
    assert "=> `pass`" not in capfd.readouterr().out
    listed(tree, one, one, one)
    assert mutants.main(["package/room/module.py"], tree) == 2


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("def test_it():\n    assert False\n", "do not pass unbroken"),
        (
            "import pytest\n\n@pytest.fixture\ndef broken():\n    raise OSError\n\ndef test_it(broken): pass\n",
            "do not pass",
        ),
        ("def test_it():\n    pass\n", "no test in memory imports package/room/module.py"),
    ],
)
def test_tests_that_say_nothing_are_an_error(
    tree: Path, capfd: pytest.CaptureFixture[str], tests: str, said: str
) -> None:
    (tree / "tests/room/test_module.py").write_text(tests)
    assert mutants.main(["package/room/module.py"], tree) == 2
    assert said in capfd.readouterr().out


def test_tests_that_hang_have_noticed_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "LEAST_S", 0.2)
    (tree / "tests/room/test_module.py").write_text(
        "import threading\n\ndef test_it():\n    threading.Event().wait()\n"
    )
    copy = mutants.Tree(tree)
    assert not copy.survives([mutants.Stage(["tests"])])
    assert copy.hung


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a == b is not c", ["x = a != b is not c", "x = a == b is c"]),
        ("x = (a) not  in b", ["x = (a) in b"]),
        ("x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        ("x = not a", ["x = a"]),
        ("x = a - (b)", ["x = a + (b)", "x = b - (a)"]),
        ("x = a // b", ["x = a * b", "x = b // a"]),
        ("x = {**a, 1: 2, **b}", ["x = {**b, 1: 2, **a}", "x = {**a, 2: 2, **b}", "x = {**a, 1: 3, **b}"]),
        ("f(a, *b, c)", []),
        ("f(a, b, c)", ["f(b, a, c)", "f(a, c, b)"]),
        ("x: int = True", ["x: int = False"]),
        ("x = a if b else c", ["x = a if (not (b)) else c"]),
        ("x = [a for a in b if a]", ["x = [a for a in b if (not (a))]"]),
        ("assert a == 1", []),
        ("x = f'{1}'", []),
        ("@g(1)\ndef f(a: 2) -> 3: 'about'", []),
        ("def f():\n    return g(1)", ["return None", "return g(2)"]),
        ("def f():\n    return None", []),
        ("def f():\n    x = (\n        a)\n    raise x", ["pass", "pass"]),
        ("if TYPE_CHECKING:\n    x = 1", []),
        ("x = 'ä' < b", ["x = 'ä' <= b"]),
    ],
)
def test_what_is_changed(source: str, changed: list[str]) -> None:
    found = found_in(source.encode())
    assert sorted(mutant.after for mutant in found) == sorted(changed)
    for mutant in found:
        compile(mutant.applied(source.encode()), "broken", "exec")


def test_a_mutant_says_where_it_is() -> None:
    (mutant,) = found_in(b"class C:\n    def f(self):\n        def g():\n            raise a\n")
    assert (mutant.line, mutant.change) == (4, ("C.f.g", "raise a", "pass"))


def test_where_the_tests_of_a_module_are() -> None:
    root = mutants.ROOT
    found = {
        name: mutants.places(root, f"rocketmq_spark/{name}.py")
        for name in (
            "spark/source/stream",
            "spark/checkpoints/rewind",
            "cli/doctor/servers",
            "base/clock",
            "columnar/decode/inner",
            "ports",
            "queues/nothing",
        )
    }
    assert found == {
        "spark/source/stream": [["tests/source/test_stream.py"], ["tests/source"]],
        "spark/checkpoints/rewind": [["tests/source/test_rewind.py"], ["tests/spark"]],
        "cli/doctor/servers": [["tests/cli/doctor/test_servers.py"], ["tests/cli/doctor"]],
        "base/clock": [["tests/test_clock.py"]],
        "columnar/decode/inner": [["tests/decode/test_inner.py"], ["tests/decode"]],
        "ports": [["tests/test_ports.py"]],
        "queues/nothing": [["tests/queues"]],
    }
    assert "slow" in mutants.in_memory(["tests/source"])
    assert "slow" not in mutants.in_memory(["tests/cli/doctor"])


def test_what_is_said_to_change_nothing_is_a_mutant_still() -> None:
    text = (mutants.ROOT / mutants.EQUIVALENT).read_text()
    assert unknown(entries(text), lambda path: mutants._source(mutants.ROOT, path)) == []
    assert unknown([Entry("gone.py", ("", "a", "b"), "why")], lambda path: None) != []
