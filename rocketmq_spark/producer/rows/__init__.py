"""Sends many rows with one call, and the rows of a sink's task. Only these modules of the producer need pyarrow and numpy."""
