"""Root causes: the performance graph of rl_steps, what is abnormal in it, what that costs, and what removes it."""
