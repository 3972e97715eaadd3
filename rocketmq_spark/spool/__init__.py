"""A durable store of what is due later, on RocksDB: what a producer could not send, and who sends it again."""
