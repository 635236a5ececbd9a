"""Commands that people run: train, generate, compare, plan."""
