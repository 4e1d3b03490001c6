"""Searches for failures that no test shows, with new random seeds in each run: `make explore ARGS="--minutes 5"`.

sources.py    the sources of random cases: programs, Python state, training steps, calls of torch's databases, hypothesis's tests
__main__.py   runs cases of all sources in turn until the time is over
"""
