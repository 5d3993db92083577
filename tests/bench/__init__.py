"""The benchmark; README.md has what it shows."""
