"""What one run on a machine with a GPU tells, as one text: `make gpu`.

It installs nothing and takes the environment's own Python. `environment` says what is missing, `stages` are what is run, each in a
process of its own within the time that is left: a GPU whose context is broken, or that hangs, ends one stage and not the others.
"""
