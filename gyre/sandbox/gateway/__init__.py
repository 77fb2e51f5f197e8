"""The model endpoint that a harness talks to."""
