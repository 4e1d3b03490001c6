"""Observability: counters, times, events, and dumps of programs."""
