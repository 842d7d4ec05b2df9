"""Live translation: a growing source is translated again and again, drafting with the last output.

`streams` and `feeds` (input), `translator` and `engine` (one translation), `display` (what is
shown), `metrics` and `latency` (stability, speed, quality), `replay` (many settings).
"""
