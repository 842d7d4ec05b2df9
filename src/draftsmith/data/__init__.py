"""Prompts, suites, text and languages: everything that is read from users' files."""
