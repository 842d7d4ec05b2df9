"""Forwards of Llama-like models on a CPU, by a small C++ extension that is built where it runs."""
