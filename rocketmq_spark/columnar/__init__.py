"""Arrow columns as buffers, for reading and writing, without a Python step per row. ``arrow`` does not depend on messages."""
