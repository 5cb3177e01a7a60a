"""The lock: pins every source by its content, and finds newer versions."""
