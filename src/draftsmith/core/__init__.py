"""The decoding core: laws, trees, verification, caches and the decoding loop."""
