"""Dual encoders of transformers: as two towers and a temperature, loading, OpenCLIP, adapters, sharding."""
