"""Spark reads: offsets, plans and columns. Consumer groups do not own positions here, Spark's checkpoint does."""
