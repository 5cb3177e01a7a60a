"""A project: the types of its files, and the plan that the files define together."""
