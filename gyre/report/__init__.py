"""Figures of a run, for people and for scripts."""
