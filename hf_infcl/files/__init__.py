"""Paths of the Hub, URLs, files that are written whole, and words of messages; no torch."""
