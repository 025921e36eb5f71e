"""What is computed over whole sets: embeddings, stored teachers, ledgers of pairs, averages of weights."""

WINDOW = 4096  # pairs that are compared with each other, unless another number is asked for
