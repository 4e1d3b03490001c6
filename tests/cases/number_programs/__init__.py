"""Random steps that compute with Python numbers, compared with eager mode. To run many: `python -m cases.number_programs --count 1000`."""
