"""Hydra configuration of opkiln-bench; `rows/` holds the workloads, one file per op."""
