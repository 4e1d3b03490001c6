"""Many threads that compile, train and call at the same time, while Python switches between threads as often as possible.

jobs.py    the jobs of a thread
runner.py  runs the threads, and measures memory and leftover objects

`python -m cases.stress --help` shows the options.
"""
