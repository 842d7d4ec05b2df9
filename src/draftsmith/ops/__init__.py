"""Tensor operations with a readable twin each."""
