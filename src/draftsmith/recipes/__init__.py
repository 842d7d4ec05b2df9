"""What the verbs run: one module per verb, each with `run(options)`."""
