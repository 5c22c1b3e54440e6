"""Element-wise ops."""
