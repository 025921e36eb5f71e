"""Embeddings of whole collections: `infcl embed`. Nothing here imports torch, because the command reads its options."""
