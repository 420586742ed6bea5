"""Lower memory, the same result."""
