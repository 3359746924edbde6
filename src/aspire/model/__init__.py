"""Models: find one (resolve), describe it (spec), load it (weights), run it (decoder)."""
