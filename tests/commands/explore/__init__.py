"""Looks for failures that no test has met, with other seeds each time: `make explore ARGS="--minutes 5"`.

sources.py    draws from a seed and judges: programs, Python state, training steps, calls of torch's databases, hypothesis's tests
__main__.py   takes one after the other until the time is over
"""
