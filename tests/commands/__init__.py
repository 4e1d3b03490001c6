"""The programs of make targets that are no tests: reports, searches for failures, the planted faults."""
