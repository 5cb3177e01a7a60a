"""Give tags to verified digests, with their evidence; list, compare, scan and prune what was published."""
