"""Random Python state that a function reads, with one change, and a check that the guards see each change that eager mode sees."""
