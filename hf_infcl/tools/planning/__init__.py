"""Predicts memory and time of a training from the model's config and from rates measured on GPUs.

Memory is counted, and within 10% of what was measured. Times are operations over a measured share of each GPU's peak,
or the launches of the host, and within 25% for most of the measured steps (scripts/benchmarks/results/PLAN.md). The
micro-batches are those that the search of the training would find with this memory. The command imports its modules
one by one, because its help needs no torch.
"""
