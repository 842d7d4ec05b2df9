"""Live translation over WebSockets."""
