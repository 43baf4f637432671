"""Benchmarks against XLA and other libraries: ``python -m benchmarks``."""
