"""``make bench``: every benchmark, one after the other."""

from __future__ import annotations

from benchmarks import read, write

if __name__ == "__main__":
    read.main()
    write.main()
