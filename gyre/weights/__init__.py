"""Policy weights as bytes: snapshots of the core, pulled in chunks by engines."""
