"""Random steps that compute with Python numbers, compared with eager mode. `python -m cases.number_programs --count 1000` runs many."""
