"""Real image-text pairs under free licences, and experiments on what the global batch is worth on them."""
