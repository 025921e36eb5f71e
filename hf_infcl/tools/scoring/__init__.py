"""How well the pairs of a training set belong together: `infcl score`, and the ledger that it writes."""
