"""Helpers for the capture by AOTAutograd: decompositions, corrections of strides, the captured ATen graphs, and their cache."""
