"""Sources, tokenizers, token caches, packing and batches."""
