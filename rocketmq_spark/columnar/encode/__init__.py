"""Arrow columns to batch bodies, and the rows that cannot be one. Nothing here knows that there is a network."""
