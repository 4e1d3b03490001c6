"""Rewrites a graph with dynamic sizes so that one program with rounded sizes serves many sizes."""
