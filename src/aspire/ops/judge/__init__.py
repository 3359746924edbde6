"""Comparing drafts with the target's picks."""
