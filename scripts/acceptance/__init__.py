"""The implementation of scripts/gpu-acceptance. Uses only Python's standard library."""
