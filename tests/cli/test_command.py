import os
import subprocess

import click
import pytest
from click.testing import CliRunner

from rocketmq_spark.cli.command import CliCommand, app, confirm, time_ms
from rocketmq_spark.errors import OptionError
from tests.cli.conftest import COMMAND

NOWHERE = ("topic", "list", "--name-server", "127.0.0.1:1", "-o", "numRetries=0")


def command(body):
    @click.command(cls=CliCommand)
    @click.pass_obj
    def one(output):
        output.item({"ok": True}, "fine")
        body()

    return one


def raising(error):
    def body():
        raise error

    return body


def test_success_is_0_and_json_is_a_choice():
    assert CliRunner().invoke(command(lambda: None)).stdout == "fine\n"
    assert CliRunner().invoke(command(lambda: None), ["--json"]).stdout == '{"ok": true}\n'


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OptionError("bad", remedy="Do this"), "Error: [ROCKETMQ_OPTION] bad. Do this\n"),
        (PermissionError(13, "Permission denied", "/x"), "Error: [ROCKETMQ_ERROR] /x: Permission denied\n"),
        (
            KeyError("x"),
            "Error: [ROCKETMQ_ERROR] KeyError: 'x'. This error is unexpected: --debug shows the stack trace\n",
        ),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(error, text):
    done = CliRunner().invoke(command(raising(error)))
    assert (done.exit_code, done.stderr) == (1, text)


def test_debug_raises():
    done = CliRunner().invoke(command(raising(OptionError("bad"))), ["--debug"])
    assert isinstance(done.exception, OptionError)


def test_ctrl_c_is_130_and_usage_is_2():
    assert CliRunner().invoke(command(raising(KeyboardInterrupt()))).exit_code == 130
    interrupt = KeyboardInterrupt()
    interrupt.add_note("It is done on broker-a, and perhaps on broker-b")
    done = CliRunner().invoke(command(raising(interrupt)))
    assert (done.exit_code, done.stderr) == (130, "It is done on broker-a, and perhaps on broker-b\n")
    assert CliRunner().invoke(command(lambda: None), ["--bad"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "error_lines"),
    [
        ((), 1, range(1, 2)),
        (("--json",), 1, range(1, 2)),
        (("--colour",), 2, range(4, 5)),
        (("--debug",), 1, range(20, 1000)),
    ],
)
def test_exit_codes_of_the_process(arguments, code, error_lines):
    done = subprocess.run([*COMMAND, *NOWHERE, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) in error_lines
    assert ("Traceback" in done.stderr) == ("--debug" in arguments)


@pytest.mark.parametrize(
    ("arguments", "code"), [(("tail", "--no-follow"), 0), (("produce", "--json", "--rate", "500"), 1)]
)
def test_a_reader_that_leaves_is_no_failure_of_who_only_reads(rocketmq, topic, run, arguments, code):
    run("produce", topic, input="line\n" * 3000)
    reading, writing = os.pipe()
    command = (arguments[0], topic, *arguments[1:], "--name-server", rocketmq.name_server)
    with subprocess.Popen([*COMMAND, *command], stdout=writing, stderr=subprocess.PIPE, text=True) as child:
        os.close(writing)
        assert os.read(reading, 10)
        os.close(reading)
        assert child.stderr is not None
        assert child.stderr.read() == ""
        assert child.wait() == code


def test_sending_commands_fail_when_their_pipe_closes():
    """What they had yet to send is not sent."""

    def sending(group, path):
        for name in group.list_commands(None):
            found = group.get_command(None, name)
            if hasattr(found, "commands"):
                yield from sending(found, f"{path}{name} ")
            elif found.broken_pipe_exit_code == 1:
                yield path + name

    assert set(sending(app, "")) == {"produce", "consume", "copy", "offsets set", "spool send", "dlq resend"}


def test_a_duration_that_reaches_behind_1970_begins_there():
    """Brokers fail at numbers that they cannot hold."""
    assert time_ms("999999999999d") == 0


def test_no_input_is_no_terminal(monkeypatch):
    """As where it was closed (<&-): it was an unexpected error."""
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(click.UsageError, match="There is no terminal for the confirmation: give --yes"):
        confirm("Delete it", False)


def test_completion_after_a_misspelt_command_is_no_stack_trace():
    how = {"_ROCKETMQ_SPARK_COMPLETE": "bash_complete", "COMP_WORDS": "rocketmq-spark tpoic l", "COMP_CWORD": "2"}
    done = CliRunner(env=how).invoke(app, prog_name="rocketmq-spark", complete_var="_ROCKETMQ_SPARK_COMPLETE")
    assert (done.exit_code, done.output) == (0, "plain,lag\n")


@pytest.mark.parametrize(
    ("words", "closed", "told"),
    [
        (("consume", "t", "--group", "g"), ">&-", "standard output is closed: messages would be consumed and"),
        (("produce", "t"), "<&-", "standard input is closed. Write lines to it, or use --file"),
    ],
)
def test_a_closed_stream_fails_before_anything_is_sent_or_read(words, closed, told):
    """Messages were consumed and printed nowhere, with exit code 0."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *words, *NOWHERE[2:]]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr
