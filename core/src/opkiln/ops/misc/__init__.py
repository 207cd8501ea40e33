"""misc specs."""
