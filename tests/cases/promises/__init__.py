"""The promises of docs/promises.md, each shown in its own process while a thread watches all that others could see.

`python -m cases.promises NAME` runs one of them.

visible.py    all that another library in the process could see
scenarios.py  a scenario for each sentence
"""
