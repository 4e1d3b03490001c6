"""How long tests wait for other processes. Where others use the machine all takes many times as long; only what hangs takes this long."""

# In seconds; less than a test may take as a whole (see pyproject.toml).
FOR_A_CHILD = 700
PATIENCE = 800
