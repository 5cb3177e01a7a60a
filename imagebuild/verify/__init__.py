"""Check an image, by reading its layers and by running commands in it."""
