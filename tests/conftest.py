"""Fixtures that every test may use, one plug-in per subject."""

import signal
from collections.abc import Iterator

import pytest

from rocketmq_spark.base import terminal

# A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C; nohup has them ignore SIGHUP.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

pytest_plugins = [
    "pytester",
    "tests.fix_house",
    "tests.fix_broker",
    "tests.fix_proxy",
    "tests.fix_spark",
    "tests.fix_wheel",
    "tests.fix_clusters",
]


@pytest.fixture(autouse=True, scope="session")
def one_process() -> Iterator[None]:
    """Commands do not continue in a fork of the tests, which lead the session of a terminal in ``docker run -it``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "continue_in_child", lambda: None)
        yield
