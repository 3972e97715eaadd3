"""Fixtures that every test may use, one plug-in per subject."""

import signal

# A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "pytester",
    "tests.fix_house",
    "tests.fix_broker",
    "tests.fix_proxy",
    "tests.fix_spark",
    "tests.fix_wheel",
    "tests.fix_clusters",
]
