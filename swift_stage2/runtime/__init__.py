"""Processes and their machine: supervisor, workers, watches, ports; a run's directory; what a command says."""
