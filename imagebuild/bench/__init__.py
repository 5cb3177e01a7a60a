"""Read the output of benchmarks, and compare it with the capabilities of the hardware."""
