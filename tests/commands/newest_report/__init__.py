"""Report on the newest releases of torch and JAX: missing names, fallbacks in use, and failures. See `make newest`."""
