"""Find, read and copy images, wherever they are: layouts, registries, engines. Knows nothing of targets."""
