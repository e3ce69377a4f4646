"""Weights, moments and layers' inputs that wait in the host's memory, and the step that fetches them."""
