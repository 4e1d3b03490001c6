"""Many threads that compile, train and call at the same time, with Python switching between them as often as it can.

jobs.py says what they do, runner.py has them do it and looks at what stays behind. `python -m cases.stress --help`.
"""
