"""Every op: its NumPy reference, then its kernels. `nbcnn.modes` is the table of what runs where."""
