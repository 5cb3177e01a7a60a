"""Pin every source by content, and propose newer versions."""
