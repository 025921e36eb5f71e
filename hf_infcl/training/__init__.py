"""`InfCLTrainer` and what it is made of."""
