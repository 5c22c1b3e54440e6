"""A network on a device: choosing a row, planning, compiling, training sessions, explanations."""
