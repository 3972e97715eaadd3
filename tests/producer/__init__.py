"""The producer is tested with a scripted sender and a clock that the test moves: nothing sleeps."""
