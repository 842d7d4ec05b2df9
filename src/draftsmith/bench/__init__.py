"""Measuring: prompt suites, interleaved runs, cost tables, reports."""
