"""The division of a global batch into micro-batches: found by trying, and finer once memory has run out."""
