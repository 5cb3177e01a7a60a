"""Images wherever they are: in a layout or archive, in the engine's store, in a registry, or only in the plan."""
