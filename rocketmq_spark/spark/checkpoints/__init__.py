"""Spark's checkpoints, read and edited outside a running query."""
