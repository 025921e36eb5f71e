"""What is published beside a trained model: its card and its curves."""
