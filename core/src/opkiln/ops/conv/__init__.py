"""conv specs."""
