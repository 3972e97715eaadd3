"""Writes from Spark: rows become batches of messages, and a task succeeds only if every message is acknowledged."""
