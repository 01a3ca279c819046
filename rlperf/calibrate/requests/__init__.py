"""Recorded requests of engines: logs replayed, and latencies of multi-turn rollouts."""
