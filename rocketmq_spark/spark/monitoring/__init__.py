"""How queries are doing: progress, metrics, and the offsets of their groups."""
