"""Computations over whole sets: embeddings, teachers, ledgers, averages of weights, and which pairs are noisy."""

WINDOW = 4096  # pairs that are compared with each other, unless another number is asked for
