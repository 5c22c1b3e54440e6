"""Studies: one question each, with tables and charts."""
