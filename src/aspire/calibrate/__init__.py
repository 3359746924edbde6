"""What `aspire calibrate` does: measure acceptance and step times of a model here, choose what pays."""
