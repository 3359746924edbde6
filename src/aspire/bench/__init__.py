"""Benchmarks behind `aspire bench`."""
