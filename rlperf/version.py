"""The version of rlperf: what a sweep's stored results and a report name."""

__version__ = "0.1.0"
