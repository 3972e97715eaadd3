"""Whether messages are stored already: where queues ended, and which ids lie behind these ends."""
