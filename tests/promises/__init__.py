"""What the README promises, shown in processes of their own: `python -m promises SENTENCE`, with everything that others could see watched.

visible.py    all that another library in the process could see
scenarios.py  a scenario for each sentence
"""
