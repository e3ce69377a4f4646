"""Many devices: who holds what, and the weights and sums of one device's part of a step."""
