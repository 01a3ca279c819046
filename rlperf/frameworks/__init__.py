"""RL frameworks: export, import and audit of their configurations, their rules, their logs and rollout dumps."""
