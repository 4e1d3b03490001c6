"""Rewrites of traced programs (jaxprs), before they are lowered to StableHLO."""
