"""Texts of others stay on their lines, in log records and in errors."""

from __future__ import annotations

import io
import logging
import logging.config
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base import logs
from rocketmq_spark.base.logs import escaped
from rocketmq_spark.errors import LocalBrokerError, OptionError, RocketMQError, ServerFault

FORGED = "7F0001\n2026-11-29 01:00:00 CRITICAL root logged in\x1b[2J\x1b]0;owned\x07\r\u2028\u202e\x85\x9b\ud800"
SHOWN = r"7F0001\n2026-11-29 01:00:00 CRITICAL root logged in\x1b[2J\x1b]0;owned\x07\r\u2028\u202e\x85\x9b\ud800"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a handler of the package's logger writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    package = logging.getLogger("rocketmq_spark")
    package.addHandler(handler)
    yield stream
    package.removeHandler(handler)


def test_texts_of_others_stay_on_the_line_of_their_record(lines: io.StringIO) -> None:
    logger = logging.getLogger("rocketmq_spark.some.module")
    logger.warning("message %s of %d", FORGED, 5)
    logger.warning(FORGED)
    logger.warning("100%% of %r", {"a": FORGED})
    assert lines.getvalue().splitlines()[:2] == [f"message {SHOWN} of 5", SHOWN]
    assert len(lines.getvalue().splitlines()) == 3


def test_the_text_of_an_error_is_escaped_once(lines: io.StringIO) -> None:
    error = ServerFault(f"broker {FORGED}", FORGED, 1, FORGED, FORGED, FORGED, FORGED)
    assert str(error).splitlines() == [str(error)]
    assert str(error).count(SHOWN) == 6
    logging.getLogger("rocketmq_spark.client").warning("failed: %s", error)
    assert lines.getvalue() == f"failed: {error}\n"


def test_the_parts_of_an_error_stay_as_they_came() -> None:
    error = RocketMQError("no", remark="a\nb")
    assert (error.remark, str(error)) == ("a\nb", r"[ROCKETMQ_ERROR] no: a\nb")


def test_problem_lists_and_local_server_logs_keep_line_breaks() -> None:
    problems = OptionError.of(["one", "two\n  - three"])
    assert (
        str(problems) == str(pickle.loads(pickle.dumps(problems))) == "[ROCKETMQ_OPTION] \n  - one\n  - two\\n  - three"
    )
    assert str(RocketMQError("a\n  - b", remedy="c\n  - d")) == r"[ROCKETMQ_ERROR] a\n  - b. c\n  - d"
    assert str(LocalBrokerError("it ended", remark="\na\nb")).endswith("it ended: \na\nb")


def test_a_record_without_such_characters_keeps_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("rocketmq_spark").warning("message %s", "id\tä")
    logging.getLogger("rocketmq_spark").warning("message %s", "a\n  - b")
    assert [(record.msg, record.args) for record in caplog.records] == [
        ("message %s", ("id\tä",)), (r"message a\n  - b", ()),
    ]  # fmt: skip


def test_traceback_keeps_lines_but_escapes_terminal_sequences(lines: io.StringIO) -> None:
    try:
        raise ValueError("user's\ntext\x1b[2J")
    except ValueError:
        logging.getLogger("rocketmq_spark.consumer").exception("failed")
    assert "\x1b" not in lines.getvalue()
    assert "ValueError: user's\ntext\\x1b[2J" in lines.getvalue()


def test_records_of_others_are_left_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("rocketmq_sparks").warning("a\n%s", "b")
    assert caplog.records[0].getMessage() == "a\nb"


def test_record_with_format_error_is_left_to_handler_unchanged() -> None:
    record = logging.makeLogRecord({"name": "rocketmq_spark", "msg": "%d\n", "args": ("x",)})
    logs.escape_record(record)
    assert (record.msg, record.args) == ("%d\n", ("x",))


def test_a_configuration_of_logs_leaves_it_in_place(lines: io.StringIO) -> None:
    logging.config.dictConfig(
        {"version": 1, "disable_existing_loggers": False, "loggers": {"rocketmq_spark.x": {"level": "INFO"}}}
    )
    logs.install()
    logging.getLogger("rocketmq_spark.x").info("a\nb")
    assert lines.getvalue() == "a\\nb\n"


@given(st.text())
def test_to_escape_again_changes_nothing(text: str) -> None:
    assert escaped(escaped(text)) == escaped(text)
    assert "\n" not in escaped(text)
    escaped(text).encode()  # a log file in UTF-8 can store it


def test_the_first_text_with_control_characters_imports_nothing() -> None:
    """Root escapes texts while it has the rights of a user who may not read Python's files."""
    code = (
        "import sys; from rocketmq_spark.base.logs import escaped; before = {*sys.modules}; escaped('a\\x1b\\udcff\\n'); "
        "print({*sys.modules} - before)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
