"""The folder that comes first in the PYTHONPATH of each rank."""
