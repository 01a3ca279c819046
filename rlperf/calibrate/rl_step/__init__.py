"""Measured rl_steps: rows, the jobs that they are, their prediction, and what a framework adds around its stages."""
