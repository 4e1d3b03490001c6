"""Small architectures, training steps, and graphs built node by node."""
