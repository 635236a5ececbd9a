"""Models in Flax NNX: a GPT, a BERT and a ViT made of one block."""
