"""Updates of parameters: SGD, Adam, gradient norm, packed weights, the state that advances with each step."""
