"""The train step, ledger, checkpoints, logs and plots."""
