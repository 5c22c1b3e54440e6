"""Files that are replaced whole, and names that are suggested."""
