"""Guards on Python state: the objects that a function can read, and checks that these objects have not changed.

snapshot.py           the interface: the guards of a function, and snapshots of all state that a call can read
object_graph.py       the objects that a function can reach, and whether they are unchanged; object_walker.py finds them
observation.py        one run of a function: the code that runs, its side effects, and its reads of state that a walk cannot reach
state_changes.py      a stamp: a number that changes when the state that a function reads changes
fingerprints.py       contents of objects, to compare; slots.py: mutable containers and their entries
reference_checks.py   fast checks that thousands of objects are unchanged
code_names.py         the names that code uses; trusted_code.py, pure_functions.py: code that need not be inspected
torch_state.py        torch's settings; invariants.py: changes of objects' classes and of tensors' metadata, which no container shows
numpy_arrays.py       NumPy arrays that can be inputs of a program; shared_memory.py: memory that tensors share with Python objects
dispatch.py           writes that op schemas do not declare; tensor classes with `__torch_dispatch__`
"""
