"""A durable store, on RocksDB, of records that are due later: the sends that a producer could not complete, and their retries."""
