"""Choosing tokens: temperature, filters, shared noise, argmax."""
