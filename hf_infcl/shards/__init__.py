"""Shards of tar or parquet files: finding, opening and reading them, from any position on; bytes, no images."""
