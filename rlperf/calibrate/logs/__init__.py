"""What the log of one run says of a cluster: constants and stage factors of its framework."""
