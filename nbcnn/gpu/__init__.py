"""The device, the one door to the compiler and its cache, graph capture, memory. It knows no layers."""
