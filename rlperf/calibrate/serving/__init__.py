"""Measured serving: rows made ready, many asked at once, overheads of an engine and of engines that nobody timed."""
