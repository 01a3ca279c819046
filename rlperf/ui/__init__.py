"""The page in a browser behind ``rlperf ui``: widgets around the functions of `rlperf`; it computes nothing itself."""
