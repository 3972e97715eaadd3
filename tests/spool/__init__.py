"""The spool is tested on real RocksDB, with a clock that the test moves; processes that are killed are in ``test_kill``."""
