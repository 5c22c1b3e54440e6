"""This package has the studies: each answers one question with tables and charts."""
