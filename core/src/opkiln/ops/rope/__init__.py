"""rope specs."""
