"""Show the results of benchmarks and checks to people and to CI."""
