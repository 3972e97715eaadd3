"""Reads from Spark: offsets, plans and tasks. The positions of a query are in Spark's checkpoint, not in a consumer group."""
