"""Levers for tests: tiny models, scripted parts, random attention cases."""
