"""The coordinator: launching, membership, the live view."""
