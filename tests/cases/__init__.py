"""Programs that tests compile and compare with eager mode: written by hand, generated at random, or taken from PyTorch."""
