"""Arrow columns to batch bodies, and the checks of rows that cannot be sent. Does not depend on a network."""
