"""Processes: the only code that starts, forks, signals or reaps."""
