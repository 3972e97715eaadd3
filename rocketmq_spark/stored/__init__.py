"""Finds out whether messages are stored already: notes the ends of queues, and reads the ids that were stored after them."""
