"""Training of drafters: packed text, objectives, checkpoints and the one training loop."""
