"""Scripts and checks in child processes, and the time limits for them."""
