import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rocketmq_spark.cli.command import COMMANDS, app

OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"
HELP = "\n".join(
    (
        "import sys",
        "from rocketmq_spark.cli.command import app",
        "app(sys.argv[1:], standalone_mode=False)",
        "heavy = {'pyspark', 'pyarrow', 'numpy', 'rich', 'rocketmq_spark.session', 'rocketmq_spark.localbroker'}",
        "print('HEAVY', sorted(heavy & set(sys.modules)))",
    )
)


def test_help_lists_all_commands():
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert [line.split()[0] for line in text.partition("Commands:\n")[2].splitlines()] == list(COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["broker", "start", "--help"], ["tail", "--help"], ["demo", "-h"]])
def test_help_imports_nothing_heavy(arguments):
    done = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True, check=True)
    assert "Usage:" in done.stdout
    assert done.stdout.endswith("HEAVY []\n")


def test_every_command_has_json_and_debug():
    def commands(group, path):
        for name in group.list_commands(None):
            found = group.get_command(None, name)
            yield from commands(found, [*path, name]) if hasattr(found, "commands") else [([*path, name], found)]

    found = {" ".join(path): command for path, command in commands(app, [])}
    assert {"demo", "broker start", "broker logs", "topic describe", "produce", "tail"} <= found.keys()
    for name, command in found.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--json", "--debug"} <= options, name


def test_version_and_unknown_commands():
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("rocketmq-spark, version 0.")
    for arguments, said in (
        (["topics"], "No such command 'topics'. Did you mean topic?"),
        (["topic", "creat"], "No such command 'creat'. Did you mean create?"),
        (["xyz"], "No such command 'xyz'.\n"),
    ):
        unknown = CliRunner().invoke(app, arguments)
        assert (unknown.exit_code, said in unknown.stderr) == (2, True), unknown.stderr


@pytest.mark.parametrize("line", re.findall(r"^rocketmq-spark (.*)$", OPERATING.read_text("utf-8"), re.MULTILINE))
def test_the_commands_of_the_page_on_operating_are_right_usage(line):
    command, arguments = app, shlex.split(line)
    while hasattr(command, "commands"):
        command = command.get_command(None, arguments.pop(0))
    command.make_context("x", arguments)


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "rocketmq_spark", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("rocketmq-spark, version")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_a_terminal_without_a_character_gets_its_number(encoding):
    program = (
        "from rocketmq_spark import cli\n"
        "from rocketmq_spark.cli import command\n"
        "command.app = lambda **how: print('9 \u2260 10')\n"
        "cli.main()"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=60)
    assert done.stdout == ("9 \u2260 10\n" if encoding == "utf-8" else "9 \\u2260 10\n").encode(encoding)
