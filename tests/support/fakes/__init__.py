"""Stand-ins: for GPUs and cuDNN, for several devices, for models with weights, and for engines that are wrong or slow."""
