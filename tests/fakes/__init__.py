"""One fake of each port in memory, for all tests. Contract tests (``tests/contracts``) or ``tests/test_ports.py`` check it."""
