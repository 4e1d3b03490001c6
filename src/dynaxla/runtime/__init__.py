"""What all the rest stands on: private entry points of torch and jaxlib, devices, layouts, forks, the heap, callbacks, random seeds."""
