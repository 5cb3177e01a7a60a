"""What refers to an image in a registry, and whether it is about that image and says what it should."""
