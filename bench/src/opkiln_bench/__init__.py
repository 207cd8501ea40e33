"""The benchmark of opkiln: workloads, timing, peers, records and pages."""

__version__ = "0.1.0"
