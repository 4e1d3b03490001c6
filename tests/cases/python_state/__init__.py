"""Random Python state that a function reads, and a random change. The guards must detect each change that affects eager mode."""
