"""Commands over TCP, blocking: knows connections and request numbers, nothing of topics and groups."""
