"""Writing from Spark: rows become batches of messages, and a task succeeds only when every message is acknowledged."""
