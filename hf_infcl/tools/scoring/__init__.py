"""How well the pairs of a training set belong together: `infcl score`, and the ledger that it writes."""

WINDOW = 4096  # pairs that are compared with each other, unless another number is asked for
