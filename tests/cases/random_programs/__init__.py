"""Small random PyTorch programs, compared compiled with eager in everything that dynaxla promises.

    PYTHONPATH=tests python -m cases.random_programs --count 10000 --seed 0

choices    where random decisions come from: a seed, or hypothesis
program    a program as data, and as source text
stepwise   a program run step by step: undefined behaviour is refused, and rounding errors are imitated
builder    a program that grows: valid operands for the next step
views, pointwise, reductions, indexing, writes, creation: the steps
generator  inputs, steps, outputs: a whole program that eager mode accepts
observed   everything that can be seen of a program's calls, and the comparison
minimise   the smallest program that still disagrees
faults     defects planted in dynaxla, which the generator must find
runner     many programs, recorded and resumed
"""
