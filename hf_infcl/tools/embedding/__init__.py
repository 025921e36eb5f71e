"""Embeddings of whole collections: `infcl embed`."""
