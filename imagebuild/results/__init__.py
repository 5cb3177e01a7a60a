"""What benchmarks printed, read into numbers: one module a tool, and no guessing."""
