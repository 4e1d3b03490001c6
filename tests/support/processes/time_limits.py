"""Time limits for other processes. They are so long that only a hang reaches them, even on a busy machine."""

# In seconds. Less than the time limit of a test (see pyproject.toml).
FOR_A_CHILD = 700
PATIENCE = 800
