"""Computations over whole sets: embeddings, teachers, ledgers, averages of weights, and which pairs are noisy."""
