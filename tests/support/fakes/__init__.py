"""Fakes of GPUs and cuDNN, of several devices, of models with weights, and engines that are wrong or slow."""
