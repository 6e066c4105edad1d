"""The folder that comes first in the PYTHONPATH of each rank, so that Python imports its sitecustomize."""
