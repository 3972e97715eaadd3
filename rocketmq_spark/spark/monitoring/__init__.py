"""Monitors queries: progress, metrics, causes of failures, and the offsets of consumer groups."""
