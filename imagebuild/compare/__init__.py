"""What differs between two images: read at the edges, compared without them, shown as table, JSON or Markdown."""
