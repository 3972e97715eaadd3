"""``make test`` as two passes at once: what runs in memory uses what the pass with servers and Spark leaves idle.

That one waits for events a fifth of its time, whatever number of processes it has, and its tests are those that a busy
machine disturbs: so it goes first at the processors, and the other one, shown in one piece at its end, takes the rest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

_IN_MEMORY = ("--complete=memory", "-m", "not live and not spark and not slow")
# Two files at a time: three take as long.
_WITH_SERVERS = ("--complete", "-n", "2", "--dist", "loadfile", "-m", "live or spark or slow")
_NICE = ("nice", "-n", "10")


def run(in_memory: Sequence[str], with_servers: Sequence[str]) -> int:
    """Run both commands; the first exit code that is not 0. What ``in_memory`` says comes when it has ended."""
    with tempfile.TemporaryFile("w+") as said:
        memory = subprocess.Popen(in_memory, stdout=said, stderr=subprocess.STDOUT)
        servers = subprocess.Popen(with_servers)
        showing = threading.Thread(target=_show, args=(memory, said))
        showing.start()
        while showing.is_alive() or servers.poll() is None:
            # Ctrl-C reaches both by itself; each ends in its own way and says what it has.
            try:
                showing.join()
                servers.wait()
            except KeyboardInterrupt:
                continue
        return memory.returncode or servers.returncode


def _show(process: subprocess.Popen[bytes], said: IO[str]) -> None:
    process.wait()
    said.seek(0)
    print("\n" + said.read(), flush=True)


def main(options: Sequence[str]) -> int:
    pytest = (sys.executable, "-m", "pytest")
    # A report of all is that of the longer pass: both would write the same file.
    return run((*_NICE, *pytest, *_IN_MEMORY, *options, "--junit-xml="), (*pytest, *_WITH_SERVERS, *options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
