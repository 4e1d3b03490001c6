"""Comparisons of compiled functions, gradients and single ops with eager mode, and operands for them."""
