"""Where everything of a step sits: positions, tokens, cache slots, selections, sampling values."""
