"""A configuration against rules, memory, time, its log and the best plan; whether its speed is normal."""
