"""What every drafter, rule and cache must keep: the output is the target's own."""
