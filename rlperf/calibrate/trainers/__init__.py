"""Measured training: rows, their costs, and the constants of all backends fitted to them together."""
