"""Looks for failures that no test has met, with other seeds each time: `make explore ARGS="--minutes 5"`.

sources.py    what can be drawn from a seed and judged: programs, surroundings, calls of torch's databases, hypothesis's tests
__main__.py   takes one after the other until the time is over
"""
