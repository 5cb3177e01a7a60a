"""Known vulnerabilities of an image: scanners, what they print, and the policy that judges it."""
