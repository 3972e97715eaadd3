"""Stored messages to columns: fetched buffers in, record batches out. Does not depend on a network."""
