"""This package replaces files whole, locks folders, checks JSON documents, suggests names, and defines the error of a wrong call."""
