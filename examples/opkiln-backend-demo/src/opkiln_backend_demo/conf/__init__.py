"""Rows for opkiln-bench."""
