"""Ways to lower memory without changing the result."""
