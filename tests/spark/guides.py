"""Pages that are programs: their blocks run from top to bottom in one namespace, and print what the page shows below them."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

from rocketmq_spark import Producer
from rocketmq_spark.cli.command import app
from tests.fix_spark import environment
from tests.helpers import indexed

SHOWN = "127.0.0.1:9876"
# A second cluster stands on a page; the tests have one broker, and its topics have other names.
ALSO_SHOWN = "127.0.0.1:9877"
COMMAND = "rocketmq-spark "
PIPELINES = "spark-pipelines "
NOT_RUN = ("py", "sh")  # the page says why
# What a page shows and the fixtures of the tests have done: installed the package, and started a broker.
DONE_BEFORE = ("python3 -m venv ", "pip install ", "rocketmq-spark broker ")
# A block with a title is a file of that name.
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


# The folders in which pages have their files.
_PLACES = re.compile(r"(?<![\w/.-])work/|~/keys/|/home/me/")


def placed(text: str, folder: Path) -> str:
    """A page's text, with ``folder`` in place of the folders of its user."""
    return _PLACES.sub(f"{folder}/", text)


class Guide:
    """A page, the broker and session that its programs find, and the folder that is their ``work``."""

    def __init__(self, path: Path, spark: Any, rocketmq: Any, folder: Path) -> None:
        self.path = path
        self.text = path.read_text("utf-8")
        self.outputs: list[tuple[str, str]] = []  # shown, printed
        self._spark, self._mq, self._folder = spark, rocketmq, folder
        self._values: dict[str, Any] = {"__name__": "guide"}
        self._printed = ""

    def run(self) -> None:
        """Run all blocks. What they leave in the session and the broker goes with the last one."""
        before = dict(self._spark.conf.getAll)
        try:
            for language, title, text in _FENCE.findall(self.text):
                if title:
                    path = Path(self._here(title))
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(self._here(text), "utf-8")
                else:
                    self._block(language, text)
        finally:
            for query in self._spark.streams.active:
                query.stop()
            self._restore(before)
            for topic in re.findall(r"^rocketmq-spark topic create (\S+)", self.text, re.MULTILINE):
                with contextlib.suppress(Exception):  # the block that creates it has not run
                    self._mq.admin.delete_topic(topic)

    def differences(self) -> list[str]:
        """What was printed otherwise than it stands on the page."""
        checker = doctest.OutputChecker()
        wrong = [pair for pair in self.outputs if not checker.check_output(*pair, _SAME)]
        return [f"{self.path.name} shows:\n{shown}\nand printed:\n{printed}" for shown, printed in wrong]

    def _block(self, language: str, text: str) -> None:
        if language == "text":
            self.outputs.append((text, self._printed))
        elif language == "python":
            self._printed = self._as_shown(self._python(self._here(text)))
        elif language == "":
            indexed(self._mq)
            self._printed = self._as_shown("".join(self._command(line) for line in self._here(text).splitlines()))
        else:
            assert language in NOT_RUN, f"{self.path.name} has a block that nothing runs: {language}"

    def _python(self, text: str) -> str:
        """What the program prints. Tests that it defines are run, too, with our fixtures of these names.

        What a producer sent is in its queues when it is closed: on a busy machine the next line may come sooner.
        """
        old, close = set(self._values), Producer.close

        def closed(producer: Producer, timeout_s: float | None = None) -> Sequence[object]:
            unsent = close(producer, timeout_s)
            indexed(self._mq)
            return unsent

        with contextlib.redirect_stdout(io.StringIO()) as out, mock.patch.object(Producer, "close", closed):
            exec(compile(text, self.path.name, "exec"), self._values)
            indexed(self._mq)
            for name in sorted(self._values.keys() - old):
                if name.startswith("test_"):
                    test = self._values[name]
                    test(**{fixture: self._fixture(fixture) for fixture in inspect.signature(test).parameters})
        return out.getvalue()

    def _fixture(self, name: str) -> Any:
        if name == "rocketmq_topic":
            topic = f"{self.path.stem}-of-a-test"
            self._mq.create_topic(topic)
            self.text += f"\nrocketmq-spark topic create {topic}\n"  # which goes at the end, too
            return topic
        return {"spark": self._spark, "rocketmq": self._mq, "tmp_path": self._folder}[name]

    def _command(self, line: str) -> str:
        if line.startswith(DONE_BEFORE) or not line:
            return ""
        if line.startswith(PIPELINES):
            program, *arguments = shlex.split(line)
            path = Path(sys.executable).with_name(program)
            ended = subprocess.run(
                [path, *arguments], env=environment(), cwd=self._folder, capture_output=True, text=True
            )
            assert ended.returncode == 0, f"{line}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
            # Of its log, the flows that ended and the end of the run.
            return "".join(one + "\n" for one in ended.stdout.splitlines() if one.endswith("COMPLETED."))
        assert line.startswith(COMMAND), f"{self.path.name} has a line that nothing runs: {line}"
        arguments = shlex.split(line.removeprefix(COMMAND), comments=True)
        done = CliRunner(env={"ROCKETMQ_NAMESRV": self._mq.name_server}).invoke(app, arguments)
        assert done.exit_code == 0, f"{line}\n{done.output}"
        return done.output

    def _here(self, text: str) -> str:
        for shown in (SHOWN, ALSO_SHOWN):
            text = text.replace(shown, self._mq.name_server)
        return placed(text, self._folder)

    def _as_shown(self, text: str) -> str:
        return text.replace(self._mq.name_server, SHOWN).replace(f"{self._folder}/", "work/")

    def _restore(self, before: dict[str, str]) -> None:
        for name, value in dict(self._spark.conf.getAll).items():
            if name not in before:
                self._spark.conf.unset(name)
            elif before[name] != value:
                self._spark.conf.set(name, before[name])
