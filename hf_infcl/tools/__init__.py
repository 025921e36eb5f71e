"""What `infcl` adds to the training: its commands, plans, checks, embeddings, scores, benchmarks and model cards."""
