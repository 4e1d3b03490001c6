"""Looking inside: counters and times, dumps of programs."""
