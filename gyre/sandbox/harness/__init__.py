"""Harnesses that gyre can install and run by name."""
