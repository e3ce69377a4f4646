"""What only notebooks use: pictures, and the checks of exercises."""
