"""Training: a whole step (forward, backward, optimizer) as one XLA program.

step.py          `compile_step`: which program fits what a function reads, and what it leaves behind
recorder.py      runs the function once on fake tensors and writes down every ATen op below autograd
scalars.py       Python numbers that become inputs of the program, such as learning rates
adam.py          Adam's step for such a learning rate, as one op
surroundings.py  what the function can read besides its arguments, and how it has changed
"""

from .step import compile_step as compile_step
