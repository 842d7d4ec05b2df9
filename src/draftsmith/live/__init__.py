"""Live translation: a growing source is translated again and again, each time from the last output.

`streams` (what comes in), `translator` (one session), `display` (what readers see), `metrics` and
`latency` (how steady, how fast, how good), `replay` (a stream under many settings).
"""
