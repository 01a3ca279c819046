"""Root causes: the performance graph of rl_steps, what is abnormal in it, what each cause costs, and what removes it."""
