"""Read what benchmarks print, and compare it with what hardware can do. Knows nothing of images."""
