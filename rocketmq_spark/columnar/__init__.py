"""Arrow columns as buffers, for reading and writing, without a Python step per row. The module ``arrow`` knows no messages."""
