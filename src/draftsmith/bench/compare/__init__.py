"""Comparison of finished runs: ranked table, plots and one page."""
