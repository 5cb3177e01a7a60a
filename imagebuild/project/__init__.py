"""Define the types of every file of a project, and compute what the files say together: the plan."""
