"""Publishing of verified images, with attestations; scans, comparison, listing and pruning of images."""
