"""One contract for each port: what a real broker does, and what its stand-ins in memory therefore do."""
