"""Random steps that are called with several sets of objects in turns: models, optimizers, and places in which a step creates tensors."""
