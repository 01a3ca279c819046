"""What a run leaves behind: step metrics in consoles, tables and event files, and dumps of its rollouts."""
