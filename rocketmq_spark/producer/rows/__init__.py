"""Many rows with one call, and the rows of a task of the sink: all of the producer that needs pyarrow and numpy."""
