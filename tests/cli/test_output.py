import json

import pytest

from rocketmq_spark.cli.output import Json, Text, one_line
from rocketmq_spark.errors import LocalBrokerError, OptionError

ROWS = [{"name": "broker-a", "count": 3}, {"name": "b", "count": None}, {"name": "c", "count": -12}]


def test_text_of_items_notes_and_rows(capsys):
    out = Text()
    out.item({"a": 1}, "one")
    out.note("for people")
    out.rows({"name": "NAME", "count": "COUNT"}, ROWS)
    seen = capsys.readouterr()
    assert seen.out.splitlines() == ["one", "NAME      COUNT", "broker-a      3", "b             -", "c           -12"]
    assert seen.err == "for people\n"


def test_a_list_stands_on_lines_of_its_own(capsys):
    Text().rows({"name": "NAME", "who": "WHO"}, [{"name": "a", "who": ["x", "  long"]}, {"name": "b", "who": None}])
    assert capsys.readouterr().out.splitlines() == ["NAME  WHO", "a     x", "        long", "b     -"]


def test_json_is_an_object_a_line_and_says_nothing_else(capsys):
    out = Json()
    out.item({"a": "ü"}, "one")
    out.note("for people")
    out.rows({"name": "NAME"}, ROWS)
    seen = capsys.readouterr()
    assert [json.loads(line) for line in seen.out.splitlines()] == [{"a": "ü"}, *ROWS]
    assert seen.err == ""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OptionError("bad", remedy="Do this"), "[ROCKETMQ_OPTION] bad. Do this"),
        (OptionError.of(["first", "second"]), "[ROCKETMQ_OPTION] first; second"),
        (LocalBrokerError("it ended", remark="\nlast\n  words"), "[ROCKETMQ_LOCAL_BROKER] it ended: last words"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_failure_is_one_line(error, text, capsys):
    assert one_line(error) == text
    Text().failure(error)
    assert capsys.readouterr().err == f"Error: {text}\n"
    Json().failure(error)
    assert json.loads(capsys.readouterr().err)["error"]["message"] == text


def test_json_failures_have_the_stable_code(capsys):
    Json().failure(OptionError("bad"))
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "ROCKETMQ_OPTION"
