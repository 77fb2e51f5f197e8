"""Ways to contain an execution."""
