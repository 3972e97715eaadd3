"""Everything that knows Spark: the data source, its reader and writer, checkpoints and monitoring."""
