"""What may be published, and how it is put together; nothing here reaches a registry."""
