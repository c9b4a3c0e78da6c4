"""What scripts/gpu-acceptance does. Python's standard library is all that it needs."""
