import io
import json
import sys

import pytest

from rocketmq_spark.base.secret import Secret
from rocketmq_spark.cli.output import Json, Text, one_line, table_lines, time_text
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


def test_a_time_that_is_none():
    assert (time_text(None), time_text(0), time_text(-1), time_text(1)) == (
        None,
        None,
        None,
        "1970-01-01T00:00:00.001Z",
    )


def test_json_is_an_object_a_line_and_says_nothing_else(capsys):
    out = Json()
    out.item({"a": "ü"}, "one")
    out.note("for people")
    out.rows({"name": "NAME"}, ROWS)
    seen = capsys.readouterr()
    assert [json.loads(line) for line in seen.out.splitlines()] == [{"a": "ü"}, *ROWS]
    assert seen.err == ""


def test_what_is_missing_in_the_results_is_told_to_programs_too(capsys):
    for out, told in ((Text(), "5 are gone\n"), (Json(), '{"warning": "5 are gone"}\n')):
        out.warning("5 are gone")
        assert capsys.readouterr() == ("", told)


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


# A title of the window, the clipboard, a line turned around, a line that was never said, half a letter, and what is harmless.
OBEYED = "\x1b]0;title\x07 \x1b]52;c;aGk=\x07 \x9b31m \u202egnp.exe\u2069 \r\x7f \ud83d \u2028 \ufeff"
HARMLESS = "Ünï 漢字 \U0001f600 \t|"


@pytest.mark.parametrize("place", ["item", "note", "failure", "rows", "topics"])
def test_nothing_that_a_terminal_obeys_is_written(place, capsys):
    """Bodies, names, remarks of a broker: whoever may send a message writes them."""
    foreign = HARMLESS + OBEYED
    for out in (Text(), Json()):
        says = {
            "item": lambda out=out: out.item({"a": foreign}, foreign),
            "note": lambda out=out: out.note(foreign),
            "failure": lambda out=out: out.failure(OptionError(foreign, remark=foreign)),
            "rows": lambda out=out: out.rows({"a": "A"}, [{"a": foreign}, {"a": [foreign, foreign]}]),
            "topics": lambda out=out: out.rows({"topic": "T", "a": "A"}, [{"topic": foreign, "a": "x" * 200}]),
        }
        says[place]()
        seen = capsys.readouterr()
        written = (seen.out + seen.err).replace("\n", "")
        assert all(letter == "\t" or letter.isprintable() for letter in written), ascii(written)
        assert written or (out.is_for_programs and place == "note")
        if not out.is_for_programs:
            assert all(part in written for part in HARMLESS.split())
            assert "\\x1b]52;c;aGk=\\x07" in written
        elif place == "item":
            assert json.loads(seen.out) == {"a": foreign}


def test_an_item_has_as_many_lines_as_it_is_given(capsys):
    """Or an id of a message could look like a result of its own."""
    Text().item({}, "a\nforged  1 sent", "b\tc")
    assert capsys.readouterr().out == "a\\nforged  1 sent\nb\tc\n"


def test_a_cell_makes_no_lines(capsys):
    Text().rows({"name": "NAME"}, [{"name": "a\nforged"}])
    assert capsys.readouterr().out.splitlines() == ["NAME", "a\\nforged"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_sentences_of_a_narrow_terminal_break_between_words(monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COLUMNS", "30")
    Text().note("short")
    Text().note("what batches 2 to 3 read-only topics have is read again")
    Text().failure(OptionError("no name server is given", remedy="Use --name-server host:port"))
    lines = err.getvalue().splitlines()
    assert lines[:3] == ["short", "what batches 2 to 3 read-only", "topics have is read again"]
    assert max(map(len, lines)) <= 30
    assert " ".join(lines[3:]) == ("Error: [ROCKETMQ_OPTION] no name server is given. Use --name-server host:port")
    Text().item({}, "a result is as long as it is, whatever the terminal")
    assert out.getvalue().count("\n") == 1


def test_a_table_too_wide_has_topics_on_separate_lines(monkeypatch):
    columns = {"topic": "TOPIC", "queueId": "QUEUE", "who": "WHO"}
    rows = [
        {"topic": "a-topic-of-some-length", "queueId": 0, "who": ["one", "two"]},
        {"topic": "a-topic-of-some-length", "queueId": 11, "who": "x"},
        {"topic": "b", "queueId": 3, "who": None},
    ]
    grouped = ["QUEUE  WHO", "a-topic-of-some-length", "    0  one", "       two", "   11  x", "b", "    3  -"]
    wide = table_lines(columns, rows, None)
    assert (len(wide), max(map(len, wide))) == (5, 34)
    assert table_lines(columns, rows, 34) == wide
    assert table_lines(columns, rows, 33) == grouped
    assert table_lines({"who": "WHO"}, rows, 2) == table_lines({"who": "WHO"}, rows, None)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "33")
    Text().rows(columns, rows)
    assert screen.getvalue().splitlines() == grouped


@pytest.mark.parametrize("output", [Json(), Text()])
def test_a_line_is_written_before_the_command_goes_on(monkeypatch, output):
    """``consume`` commits behind it: what is held back in this process would be missing after a kill."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "utf-8"))
    output.item({"n": 1}, "one")
    assert written.getvalue() in (b'{"n": 1}\n', b"one\n")


def test_a_secret_is_hidden_in_every_format(capsys):
    config = {"key": Secret("s3cret"), "nested": [{"key": Secret("s3cret")}, (Secret("s3cret"),)]}
    Json().item(config, "")
    Json().rows({"key": "KEY"}, [config])
    Text().rows({"key": "KEY"}, [config])
    Json().failure(OptionError(f"kept {config['key']}", remedy=f"{config}"))
    seen = capsys.readouterr()
    assert "s3cret" not in seen.out + seen.err
    assert json.loads(seen.out.splitlines()[0]) == {"key": "***", "nested": [{"key": "***"}, ["***"]]}
