"""Writing the verdicts of a step into the slots."""
