"""Small random PyTorch programs. All that dynaxla promises of a compiled program is compared with eager mode.

    PYTHONPATH=tests python -m cases.random_programs --count 10000 --seed 0

choices    sources of random decisions: a seed, or hypothesis
program    a program as data, and as source text
stepwise   runs a program step by step, rejects undefined behaviour, and simulates rounding errors
builder    adds steps with valid operands to a program
views, pointwise, reductions, indexing, writes, creation: the steps
generator  generates whole programs that eager mode accepts: inputs, steps, outputs
observed   the observable effects of a program's calls, and their comparison
judge      the verdict on a program
minimise   reduces a program that disagrees
rounded    programs with rounded sizes
fault_search, rounded_fault_search: check that planted faults are found
runner     runs many programs, records the verdicts, and continues interrupted runs
"""
