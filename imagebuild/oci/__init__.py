"""Images in OCI layouts, archives, registries and engines: find, read and copy them. Independent of the matrix."""
