"""Seconds that tests wait for other processes. On a busy machine everything takes many times as long; only a hang takes this long."""

# In seconds; less than a test may take as a whole (see pyproject.toml).
FOR_A_CHILD = 700
PATIENCE = 800
