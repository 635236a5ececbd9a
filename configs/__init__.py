"""Experiment configurations: one readable file each."""
