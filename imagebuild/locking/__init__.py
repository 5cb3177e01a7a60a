"""Sources to pins: asking upstream, the lock's entries, checking them, proposing newer versions."""
