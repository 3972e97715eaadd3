import subprocess
import sys

import pytest
from click.testing import CliRunner

from rocketmq_spark.cli.app import _COMMANDS, app

HELP = "\n".join(
    (
        "import sys",
        "from rocketmq_spark.cli.app import app",
        "app(sys.argv[1:], standalone_mode=False)",
        "heavy = {'pyspark', 'pyarrow', 'numpy', 'rich', 'rocketmq_spark.session', 'rocketmq_spark.localbroker'}",
        "print('HEAVY', sorted(heavy & set(sys.modules)))",
    )
)


def test_help_lists_all_commands():
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert [line.split()[0] for line in text.partition("Commands:\n")[2].splitlines()] == list(_COMMANDS)


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


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "rocketmq_spark", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("rocketmq-spark, version")
