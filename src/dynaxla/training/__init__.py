"""Training: a whole step (forward, backward, optimizer) as XLA programs.

step.py          `compile_step`: which way a call goes
watched.py       the programs of a step: one runs, and no Python, while nothing that the step could look at has changed
looks.py         eager mode, watched: the values that Python asks tensors for; eager_collectives.py: collectives of a program in eager mode
recorded_graph.py  a recorded graph to run: a program, and the updates that torch does after it (updates.py, fused_steps.py)
recorder.py      runs the function once on fake tensors and writes down every ATen op below autograd; recordings.py: what that gave
observation.py   what the function does besides computing (purity.py), and which code runs (names.py)
readings.py      whether what a function reads has changed since it was captured
surroundings.py  what the function can read besides its arguments (visiting.py, holders.py), as contents (contents.py, trust.py), and how
                 it has changed (watching.py); torch_state.py: torch's own settings
scalars.py       Python numbers that become inputs of the program, such as learning rates
draws.py         random draws that a step makes again
shadows.py       what a step sees while it is recorded, and other threads do not see
"""

from ..runtime import quiet_jax as quiet_jax  # before anything else imports JAX
from .step import compile_step as compile_step
