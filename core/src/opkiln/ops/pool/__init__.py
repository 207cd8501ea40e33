"""pool specs."""
