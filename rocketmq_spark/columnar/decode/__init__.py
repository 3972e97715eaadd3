"""Stored messages to columns: fetched buffers in, record batches out. Nothing here knows that there is a network."""
