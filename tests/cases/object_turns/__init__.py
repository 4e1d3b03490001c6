"""Random steps that are called with several sets of objects in turns: models, optimizers, and containers for new tensors."""
