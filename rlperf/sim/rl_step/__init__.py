"""The rl_step: rollout, reward, scoring, training and weight sync composed into a Timeline, in every execution mode."""
