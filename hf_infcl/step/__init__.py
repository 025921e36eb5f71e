"""The gradient of one optimizer step: passes over micro-batches, terms, selections, checks; one's own loop."""
