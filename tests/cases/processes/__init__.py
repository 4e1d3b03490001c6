"""Programs of processes that tests start, most of them several processes with collectives."""
