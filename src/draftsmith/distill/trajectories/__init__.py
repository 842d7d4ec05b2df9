"""Trajectories of the target: collecting, storing and reading them."""
