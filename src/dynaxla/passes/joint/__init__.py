"""Rewrites of AOTAutograd's joint graph, and its division into a forward and a backward graph."""
