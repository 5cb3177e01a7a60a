"""Ways to run a command in an image."""
