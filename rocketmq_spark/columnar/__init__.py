"""Arrow columns as buffers, for what is read and what is written: no step per row, and nothing of messages."""
