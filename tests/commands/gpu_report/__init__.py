"""The first minutes on an NVIDIA GPU: `make gpu ARGS="--output DIR --minutes 6.3"`.

The command installs nothing and uses the environment's own Python. `runs` lists the runs in their order: the parts in `parts` and the test
files of tests/gpu. Each run is a process of its own with a time limit, so that a crash or a hang costs that run only. Every fact is
appended to DIR/facts.jsonl when it is known (`facts`), and all output goes to DIR/log.txt.
"""
