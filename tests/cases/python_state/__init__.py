"""Random surroundings of a function, one change somewhere in them, and the question whether the watch sees what eager mode sees."""
