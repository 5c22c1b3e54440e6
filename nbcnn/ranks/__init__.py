"""This package lets several processes, one per GPU, train together: their environment, their meeting, their collectives."""
