"""Files that are replaced whole, names that are suggested, the error of a caller."""
