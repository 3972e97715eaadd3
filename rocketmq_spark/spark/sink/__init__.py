"""Spark writes: rows to batch bodies, and a task that succeeds only when every message is acknowledged."""
