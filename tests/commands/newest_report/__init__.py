"""The releases of torch and JAX of today: what dynaxla misses in them, what runs another way there, and what fails. See `make newest`."""
