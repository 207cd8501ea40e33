"""Normalization specs."""
