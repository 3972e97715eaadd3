"""``rocketmq-spark help``: each page, option and error, as the site shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from rocketmq_spark import errors
from rocketmq_spark.cli import command
from rocketmq_spark.options import TABLE
from tests.cli.conftest import documents

Run = Callable[..., Result]
DOCS = Path(__file__).parents[2] / "docs"


def _below(kind: type[errors.RocketMQError]) -> Iterator[type[errors.RocketMQError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _below(one)


def test_every_page_is_listed_with_its_title_and_shown_as_it_is(run: Run) -> None:
    listed = {row["page"]: row["title"] for row in documents(run("help", "--json").output)}
    assert set(listed) == {str(path.relative_to(DOCS))[:-3] for path in DOCS.rglob("*.md")}
    assert (listed["errors"], listed["how-to/replay"]) == ("Errors", "Replay from a time")
    names = list(listed)
    assert listed["options"] == "Options", "not the settings of the site above it"
    assert names.index("writing") < names.index("how-to/avro-bodies"), "recipes come last"
    for name in ("errors", "docs/errors.md", "errors.md", "Errors"):
        assert run("help", name).output == (DOCS / "errors.md").read_text(encoding="utf-8")
    assert run("help", "replay").output == run("help", "how-to/replay").output
    (page,) = documents(run("help", "how-to/replay", "--json").output)
    assert page["text"] == (DOCS / "how-to" / "replay.md").read_text(encoding="utf-8")


def test_every_option_and_every_error_is_shown(run: Run) -> None:
    rows = {
        name: row
        for page in ("errors", "options")
        for name, row in command._rows_by_name((DOCS / f"{page}.md").read_text("utf-8"))
    }
    assert {row.name for row in TABLE} <= set(rows)
    assert {kind.code for kind in _below(errors.RocketMQError)} <= set(rows)
    lines = run("help", "rocketmq_busy").output.split("\n")
    assert lines[:3] == ["code: ROCKETMQ_BUSY", "class: BrokerBusy", "temporary: yes"]
    (given,) = documents(run("help", "namesrvaddr", "--json").output)
    assert given["option"] == "nameServer (or namesrvAddr)"
    assert command._rows_by_name("| a | b |\n| --- | --- |\n| `x` or `y` | p \\| `q` |\n") == [
        (name, {"a": "x or y", "b": "p | q"}) for name in "xy"
    ]


def test_a_name_that_is_a_command_shows_its_help(run: Run) -> None:
    assert run("help", "dlq").output.startswith("Usage: ")
    assert "resend" in run("help", "dlq").output
    (told,) = documents(run("help", "dlq", "--json").output)
    assert (told["command"], "resend" in told["text"]) == ("dlq", True)


def test_an_option_and_a_command_of_one_name_are_both_shown(run: Run) -> None:
    option, usage = run("help", "group").output.split("Usage: ")
    assert (option.split("\n")[0], "describe" in usage) == ("option: group", True)


@pytest.mark.parametrize(
    ("given", "near"),
    [("exactly-oncee", "exactly-once"), ("startingtimestam", "startingTimestamp"), ("zzzzzz", None)],
)
def test_another_name_is_refused_with_the_nearest(run: Run, given: str, near: str | None) -> None:
    done = run("help", given)
    assert done.exit_code == 1
    assert f"no page, option or error '{given}'" in done.stderr
    assert (f"Did you mean {near} or " in done.stderr) == (near is not None)
    assert "All pages: rocketmq-spark help" in done.stderr


def test_a_verb_of_a_command_leads_to_the_command(run: Run) -> None:
    assert "See rocketmq-spark help topic. All pages" in run("help", "update").stderr
    assert "See rocketmq-spark help checkpoint. All pages" in run("help", "rewind").stderr


def test_an_installation_without_pages_says_so(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_PAGE_FOLDERS", (tmp_path,))
    done = run("help")
    assert (done.exit_code, "this installation has no pages" in done.stderr) == (1, True)
