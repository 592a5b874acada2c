"""A process and its machine: the end of torchrun, stuck threads, memory, routes, visible GPUs."""
