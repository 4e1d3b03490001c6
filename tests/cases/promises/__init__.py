"""The promises of docs/promises.md, each tested in its own process, in which a second thread compares all visible state.

`python -m cases.promises NAME` tests one of them.

visible.py    the state that another library in the process can see
scenarios.py  a scenario for each promise
"""
