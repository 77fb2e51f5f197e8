"""Executions: backends, tasks, grading and the gateway."""
