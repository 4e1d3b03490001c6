"""Programs of make targets other than tests: reports, searches for failures, and planted faults."""
