"""Fixtures that every test may use, one plug-in per subject."""

import ctypes
import signal
import sys

# A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An idle broker wakes 2,000 times a second, which takes a twentieth of a core of each of them for as long as tests run.
# With a slack of 10 ms, which all that tests start inherits, the kernel lets such sleeps end together.
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(29, 10_000_000, 0, 0, 0)  # PR_SET_TIMERSLACK

pytest_plugins = [
    "pytester",
    "tests.fix_house",
    "tests.fix_broker",
    "tests.fix_proxy",
    "tests.fix_spark",
    "tests.fix_wheel",
    "tests.fix_clusters",
]
