"""What benchmarks and checks said, for people and for CI: a page, JUnit, Markdown, JSON and a table in the terminal."""
