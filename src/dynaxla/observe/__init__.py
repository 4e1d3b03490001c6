"""Observability: counters, times, events, progress reports, and dumps of graphs and programs."""
