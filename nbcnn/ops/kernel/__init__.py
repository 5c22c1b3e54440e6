"""What every kernel uses: calls and launches, traffic, storage types, reductions, windows, tensor maps, small loops."""
